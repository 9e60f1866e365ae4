/* A persistent Node.js as a context of a session. Implements the protocol of repl.py. */
"use strict";
const fs = require("fs");
const repl = require("repl");
const stream = require("stream");
const util = require("util");
const vm = require("vm");

const REQUEST = 3;
const RESPONSE = 4;
const readSync = fs.readSync;
const writeSync = fs.writeSync;
const inspect = util.inspect;
const [VALUE_BYTES, TRACEBACK_BYTES] = process.argv.slice(-2).map(Number);

function readExactly(count) {
  const data = Buffer.alloc(count);
  for (let at = 0; at < count; ) {
    const got = readSync(REQUEST, data, at, count - at, null);
    if (got === 0) process.exit(0);
    at += got;
  }
  return data;
}

function receive() {
  const body = readExactly(readExactly(4).readUInt32LE(0));
  const fields = [];
  for (let i = 0, at = 8; i < body.readUInt32LE(4); i++) {
    const size = body.readUInt32LE(at);
    fields.push(body.subarray(at + 4, at + 4 + size).toString("utf8"));
    at += 4 + size;
  }
  return [body.readUInt32LE(0), fields];
}

function send(number, fields) {
  const parts = fields.map((field) => Buffer.from(String(field), "utf8"));
  const head = Buffer.alloc(12);
  const size = 8 + parts.reduce((sum, part) => sum + 4 + part.length, 0);
  head.writeUInt32LE(size, 0);
  head.writeUInt32LE(number, 4);
  head.writeUInt32LE(parts.length, 8);
  const all = [head];
  for (const part of parts) {
    const length = Buffer.alloc(4);
    length.writeUInt32LE(part.length, 0);
    all.push(length, part);
  }
  const data = Buffer.concat(all);
  for (let at = 0; at < data.length; ) at += writeSync(RESPONSE, data, at);
}

/* Like clip() of repl.py. */
function clip(text, size) {
  const data = Buffer.from(text.slice(0, size + 1), "utf8");
  if (data.length <= size) return text;
  const mark = `\n... cut: ${text.length} characters in all ...\n`;
  const half = (size - mark.length) >> 1;
  const inside = (byte) => (byte & 0xc0) === 0x80; // a later byte of a character
  const last = Buffer.from(text.slice(-half), "utf8");
  let [end, start] = [half, last.length - half];
  while (inside(data[end])) end--;
  while (inside(last[start])) start++;
  return data.toString("utf8", 0, end) + mark + last.toString("utf8", start);
}

function describe(error) {
  try {
    const known = error instanceof Error;
    const stack = known && error.stack ? error.stack : "";
    return ["error", clip(String(known ? error.name : typeof error), 200),
            clip(String(known ? error.message : inspect(error)), 4096),
            clip(String(stack), TRACEBACK_BYTES)];
  } catch (again) {
    return ["error", "unprintable", "", ""];
  }
}

let interrupt = () => {};
process.on("SIGINT", () => interrupt()); // never removed: the default would end the process

/* Node's own console supports top-level await; imports are rewritten to awaited calls. */
const server = repl.start({
  prompt: "", input: new stream.PassThrough(), output: new stream.PassThrough().resume(),
  useGlobal: true,
});
let fail = () => {};
if (server._domain) server._domain.removeAllListeners("error").on("error", (error) => fail(error));
const IMPORT = new RegExp(
  "^\\s*import\\s+(?:([\\w$]+)\\s*,?\\s*)?(?:\\{([^}]*)\\}|\\*\\s*as\\s+([\\w$]+))?" +
  "\\s*(?:from\\s*)?(['\"][^'\"]+['\"])", "gm");

function importCall(_, main, named, all, from) {
  const parts = [named && named.replace(/\sas\s/g, ": "), main && `default: ${main}`];
  return `const ${all || `{ ${parts.filter(Boolean).join(", ")} }`} = await import(${from})`;
}

function evaluateAsync(code, file) {
  return new Promise((done, failed) => {
    fail = failed;
    server.eval(code, server.context, file, (error, value) =>
      error ? failed(error.err || error) : done(value));
  });
}

async function evaluate(source, count) {
  const interrupted = new Promise((_, reject) => {
    interrupt = () => reject(new Error("interrupted"));
  });
  interrupted.catch(() => {});
  const code = source.replace(IMPORT, importCall);
  const filename = `<cell ${count}>`;
  try {
    let value = /\bawait\b/.test(code)
      ? evaluateAsync(code, filename)
      : vm.runInThisContext(code, { filename, breakOnSigint: true });
    if (value && typeof value.then === "function") value = await Promise.race([value, interrupted]);
    await Promise.race([new Promise((done) => setImmediate(done)), interrupted]);
    return value === undefined ? ["ok"] : ["ok", "value", clip(inspect(value), VALUE_BYTES)];
  } catch (error) {
    return describe(error);
  } finally {
    interrupt = () => {};
  }
}

/* Calls work with environment variables (name, value, ...), and restores them afterwards. */
async function withEnvironment(pairs, work) {
  if (!pairs.length) return work();
  try {
    const previous = { ...process.env };
    for (let i = 0; i < pairs.length; i += 2) process.env[pairs[i]] = pairs[i + 1];
    const answer = await work();
    for (let i = 0; i < pairs.length; i += 2) {
      if (Object.hasOwn(previous, pairs[i])) process.env[pairs[i]] = previous[pairs[i]];
      else delete process.env[pairs[i]];
    }
    return answer;
  } catch (error) {
    return describe(error);
  }
}

globalThis.require = require;
setInterval(() => {}, 1 << 30); // a promise that is never settled must not end the process
process.on("uncaughtException", (error) => process.stderr.write(`${inspect(error)}\n`));
(async () => {
  for (let count = 1; ; count++) {
    const [number, fields] = receive();
    const known = fields[0] === "run" || fields[0] === "cell";
    const run = () => evaluate(fields[1], count);
    send(number, known ? await withEnvironment(fields.slice(2), run) : ["ok"]);
  }
})();
