// The runs in this file. The index is unpacked at the start, the tokens of a step on demand.

const [PROMPT, SAMPLED, GIVEN] = [0, 1, 2];

async function unpacked(id) {
  const raw = atob($("#" + id).textContent);
  const bytes = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) bytes[i] = raw.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).arrayBuffer();
}

class Run {
  static async open(slot) {
    const index = JSON.parse(new TextDecoder().decode(await unpacked(`run${slot}`)));
    return new Run(index, slot);
  }

  constructor(index, slot) {
    Object.assign(this, index);
    this.slot = slot;
    this._unpacked = new Map();
    const { ids, shown, special } = index.vocabulary;
    this._shown = new Map(ids.map((id, place) => [id, shown[place]]));
    this._special = new Set(special);
    this._makeGroups();
    const rewards = this.rollouts.map((rollout) => rollout.reward);
    this.reward = rewards.reduce(([low, high], r) => [Math.min(low, r), Math.max(high, r)], [0, 1e-9]);
  }

  _makeGroups() {
    this.groups = [];
    const known = new Map();
    this.rollouts.forEach((rollout, id) => {
      const key = `${rollout.chunk}/${rollout.group}`;
      if (!known.has(key)) {
        known.set(key, { id: this.groups.length, members: [] });
        this.groups.push(known.get(key));
      }
      Object.assign(rollout, { id, inGroup: known.get(key) });
      known.get(key).members.push(rollout);
    });
  }

  task(rollout) { return this.tasks[rollout.task]; }

  question(rollout) {
    const { messages } = this.task(rollout);
    const question = [...messages].reverse().find((message) => message.role === "user") || messages[0];
    return question ? String(question.content) : this.task(rollout).id;
  }

  async _chunk(number) {
    if (!this._unpacked.has(number)) {
      this._unpacked.set(number, unpacked(`run${this.slot}-chunk${number}`).then((buffer) => {
        const [numIds, numSampled] = this.chunks[number];
        const streams = {};
        this.streams.forEach((name, place) => {
          streams[name] = new Float32Array(buffer, 4 * (numIds + place * numSampled), numSampled);
        });
        return { ids: new Int32Array(buffer, 0, numIds), streams };
      }));
    }
    return this._unpacked.get(number);
  }

  // The segments of a rollout: origin, ids, text per token, advantage, streams (null where not recorded).
  async segments(rollout) {
    const chunk = await this._chunk(rollout.chunk);
    const numbers = (rollout.rows || []).flatMap(([, turns]) => turns); // in the order in which they were played
    let offset = 0, turn = 0;
    return rollout.segments.map(([origin, start, length, at, own]) => {
      const ids = chunk.ids.subarray(start, start + length);
      const segment = { origin, ids, offset, texts: this.texts(ids), streams: {} };
      if (origin === SAMPLED) turn += 1;
      segment.turn = numbers.length && origin === SAMPLED ? numbers[turn - 1] + 1 : turn;
      segment.advantage = own === null ? rollout.advantage : own;
      for (const name of this.streams) {
        const values = at < 0 ? null : chunk.streams[name].subarray(at, at + length);
        segment.streams[name] = values && values.length && !Number.isNaN(values[0]) ? values : null;
      }
      offset += length;
      return segment;
    });
  }

  // All ids of a rollout, and the span of each segment with its origin.
  async outline(rollout) {
    const chunk = await this._chunk(rollout.chunk);
    const ids = [], kinds = [];
    for (const [origin, start, length] of rollout.segments) {
      kinds.push([origin, ids.length, ids.length + length]);
      for (let k = start; k < start + length; k++) ids.push(chunk.ids[k]);
    }
    return { rollout, ids, kinds };
  }

  // Text per token; a character that spans several tokens is put at the first of them.
  texts(ids) {
    const texts = Array.from(ids, (id) => this._shown.get(id));
    for (let i = 0; i < texts.length; i++) {
      if (!Array.isArray(texts[i])) continue;
      let end = i;
      while (end < texts.length && Array.isArray(texts[end])) end++;
      const decoder = new TextDecoder();
      for (let k = i, first = i; k < end; k++) {
        const whole = decoder.decode(new Uint8Array(texts[k]), { stream: k + 1 < end });
        texts[k] = "";
        if (!whole) continue;
        texts[first] = whole;
        first = k + 1;
      }
      i = end - 1;
    }
    return texts;
  }

  isSpecial(id) { return this._special.has(id); }

  async text(rollout) {
    const segments = await this.segments(rollout);
    return segments.map((segment) => segment.texts.join("")).join("");
  }

  has(stream) { return this.recorded.includes(stream); }

  // [{x, y}] of a metric; x: number of finished steps. The row of training step n has step n but is written after it.
  series(name) {
    return this.metrics.filter((row) => typeof row[name] === "number").map((row) => ({ x: row.step + ("rollout/reward" in row ? 1 : 0), y: row[name] }));
  }

  metricNames() { return [...new Set(this.metrics.flatMap((row) => Object.keys(row)))].filter((name) => name !== "step").sort(); }
}

function rewardColour(run, reward) {
  const [low, high] = run.reward;
  const share = (reward - low) / (high - low || 1);
  return `color-mix(in oklab, var(--good) ${Math.round(100 * share)}%, var(--bad))`;
}
