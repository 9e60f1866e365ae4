// One rollout, token by token.

const MODES = {
  origin: { label: "origin", what: "prompt, policy or environment" },
  surprise: { label: "surprise", what: "improbability of the sampled token", stream: "logprobs" },
  advantage: { label: "advantage", what: "training makes it more (green) or less (red) likely" },
  ratio: { label: "ratio", what: "learner's probability over the sampler's", stream: "learner_logprobs" },
  entropy: { label: "entropy", what: "uncertainty of the policy", stream: "entropies" },
};
const PART = 500; // tokens per element: the browser lays out only visible elements

function tint(mode, segment, k) {
  if (segment.origin !== SAMPLED) return "";
  const heat = (share) => (share > 0.02 ? `rgba(var(--heat-rgb), ${(0.75 * Math.min(1, share)).toFixed(2)})` : "");
  const either = (value) => (Math.abs(value) < 0.01 ? "" : `rgba(var(--${value > 0 ? "good" : "bad"}-rgb), ${(0.12 + 0.5 * Math.min(1, Math.abs(value))).toFixed(2)})`);
  const { logprobs, learner_logprobs: learner, entropies } = segment.streams;
  if (mode === "surprise") return logprobs ? heat(-logprobs[k] / 5) : "";
  if (mode === "advantage") return either(segment.advantage / 2);
  if (mode === "ratio") return learner ? either((learner[k] - logprobs[k]) / Math.log(1.2)) : "";
  if (mode === "entropy") return entropies ? heat(entropies[k] / 3) : "";
  return "";
}

const SCALES = {
  surprise: ["p = 1", "linear-gradient(90deg, transparent, rgba(var(--heat-rgb), .75))", "p ≤ 0.007"],
  advantage: ["−2", "linear-gradient(90deg, rgba(var(--bad-rgb), .62), transparent, rgba(var(--good-rgb), .62))", "+2"],
  ratio: ["÷1.2", "linear-gradient(90deg, rgba(var(--bad-rgb), .62), transparent, rgba(var(--good-rgb), .62))", "×1.2"],
  entropy: ["0", "linear-gradient(90deg, transparent, rgba(var(--heat-rgb), .75))", "3 nats"],
};

class RolloutView {
  constructor(run, options = {}) {
    this.run = run;
    this.options = options; // {narrow: shown next to another, choose: called with a rollout of the group}
    this.mode = "origin";
    this.panel = h("div", { class: "token quiet", "aria-live": "polite" }, "Point at a token, or click one and use the arrow keys.");
    this.body = h("div", { class: "body" });
    this.element = h("article", { class: "detail", "aria-label": "Rollout" }, this.body, this.panel);
    this.pinned = -1;
  }

  async show(rollout, query = "") {
    this.rollout = rollout;
    const segments = await this.run.segments(rollout);
    if (this.rollout !== rollout) return; // another rollout was chosen during the await
    this.segments = segments;
    this.query = query;
    const group = rollout.inGroup;
    if (this.group !== group) {
      const alone = this.options.narrow || group.members.length === 1;
      const tree = alone ? null : await groupTree(this.run, group, this.options.choose);
      if (this.rollout !== rollout) return;
      [this.group, this.tree] = [group, tree];
    }
    if (this.tree) markLeaf(this.tree, rollout);
    this.stream = h("div", { class: "stream" });
    this.body.replaceChildren(...[this.heading(), this.tree, this.facts(), this.modes(), this.stream].filter(Boolean));
    this.pin(-1);
    this.draw();
    this.element.scrollTop = 0;
    this.element.dataset.shown = String(rollout.id);
  }

  heading() {
    const { rollout, run } = this;
    const when = rollout.split === "heldout" ? `held out, after ${plural(rollout.step, "step")}` : `step ${rollout.step + 1}, group ${rollout.group}, rollout ${rollout.index}`;
    return h("div", {}, h("div", { class: "crumbs quiet" }, this.options.narrow && h("b", {}, run.name), when, h("span", { class: "mono" }, run.task(rollout).id)), h("h2", { style: "margin: 4px 0 0; white-space: pre-wrap" }, run.question(rollout)));
  }

  facts() {
    const { rollout, run } = this;
    const spec = run.task(rollout).spec || {};
    const fact = (name, value, css = "") => h("div", { class: "fact small" }, h("b", { class: css }, value), h("span", { class: "quiet" }, name));
    const parts = Object.entries(rollout.rewards).map(([name, value]) => `${words(name)} ${number(value)}`).join(" + ");
    const errors = rollout.stats.tool_errors ?? 0;
    return [
      h("div", { class: "facts" },
        fact(parts || "not scored", `reward ${number(rollout.reward)}`),
        rollout.split === "heldout" ? fact("held out: not trained on", "no advantage") : fact(rollout.advantage ? "compared with its group" : "no gradient", `advantage ${signed(rollout.advantage)}`, rollout.advantage > 0 ? "good" : rollout.advantage < 0 ? "bad" : ""),
        fact("status", words(rollout.status), rollout.status === "completed" ? "" : "bad"),
        fact(spec.answer !== undefined ? `answer; expected ${spec.answer}` : "answer", rollout.answer ?? "none"),
        rollout.stats.tool_calls !== undefined && fact("tool calls", errors ? `${number(rollout.stats.tool_calls)}, ${number(errors)} failed` : number(rollout.stats.tool_calls), errors ? "bad" : "")),
      rollout.error && h("p", { class: "bad" }, `The machine said: ${rollout.error}`),
      rollout.spans && h("p", {}, "Rewards of single steps: ", rollout.spans.map(([start, end, name, value]) => h("span", { class: "pill", title: `tokens ${start} to ${end}` }, `${words(name)} ${signed(value)}`))),
      h("details", {}, h("summary", { class: "quiet" }, "full record"), h("pre", { class: "mono scroll" }, JSON.stringify({ task: run.task(rollout), stats: rollout.stats, rewards: rollout.rewards, timings: rollout.timings, parent: rollout.parent, forked_at: rollout.forked_at, treatment: rollout.treatment }, null, 1))),
    ].filter(Boolean).reduce((box, part) => (box.append(part), box), h("div"));
  }

  modes() {
    const missing = (mode) => MODES[mode].stream && !this.run.has(MODES[mode].stream);
    const scale = h("span", { class: "scale" });
    const buttons = Object.entries(MODES).map(([mode, { label, what }]) => h("button", { type: "button", "data-mode": mode, disabled: missing(mode), title: missing(mode) ? `${label}: not recorded in this run` : what, "aria-pressed": String(this.mode === mode), onclick: () => this.colour(mode) }, label));
    this.bar = h("div", { class: "modes", role: "group", "aria-label": "Colour tokens by" }, h("span", { class: "quiet" }, "colour by"), buttons, scale);
    this.bar.scale = scale;
    return this.bar;
  }

  colour(mode) {
    if (MODES[mode].stream && !this.run.has(MODES[mode].stream)) return;
    this.mode = mode;
    this.draw();
  }

  draw() {
    for (const button of $$("button", this.bar)) button.setAttribute("aria-pressed", String(button.dataset.mode === this.mode));
    const [low, gradient, high] = SCALES[this.mode] || [];
    this.bar.scale.replaceChildren(...(gradient ? [low, h("i", { style: `background:${gradient}` }), high] : ["", h("b", { class: "swatch prompt" }, "prompt"), h("b", { class: "swatch sampled" }, "sampled"), h("b", { class: "swatch given" }, this.program ? "program" : "environment")]));
    this.stream.className = `stream ${this.mode}`;
    const shown = this.segments.map((segment, place) => this.segment(segment, place));
    this.stream.replaceChildren(...(this.rollout.rows ? this.conversations(shown) : shown));
  }

  // Rows of tokens side by side, in the order of their first turns, each with the row it continues.
  conversations(shown) {
    const { rows } = this.rollout, name = this.program ? "conversation" : "row";
    const order = rows.map((_, row) => row).sort((a, b) => rows[a][1][0] - rows[b][1][0]);
    const named = (row) => `${name} ${order.indexOf(row) + 1}`;
    return [h("div", { class: "conversations" }, order.map((row) => {
      const [count, turns, parent, shared] = rows[row], first = this.firstOf(row);
      const forked = parent < 0 ? undefined : rows[parent][1].filter((_, k) => this.endOf(parent, k) <= shared).at(-1);
      const samePrompt = parent >= 0 && shared >= this.segments[this.firstOf(parent)].ids.length;
      const from = forked !== undefined ? `continues after turn ${forked + 1} of ${named(parent)}` : samePrompt ? `same prompt as ${named(parent)}` : "starts on its own";
      return h("section", { class: "conversation" }, h("h3", {}, `${named(row)} of ${rows.length}`), h("p", { class: "quiet small" }, `${plural(turns.length, "turn")} · ${from}`), shown.slice(first, first + count));
    }))];
  }

  firstOf(row) { return this.rollout.rows.slice(0, row).reduce((sum, [count]) => sum + count, 0); }

  // Tokens of a row up to the end of its k-th turn.
  endOf(row, k) {
    const first = this.firstOf(row), own = this.segments.slice(first, first + this.rollout.rows[row][0]);
    const turn = own.filter(({ origin }) => origin === SAMPLED)[k];
    return turn.offset + turn.ids.length - own[0].offset;
  }

  get program() { return this.run.config["agent.kind"] === "program"; }

  segment(segment, place) {
    const { origin, ids, turn } = segment;
    const toks = h("div", { class: "toks", tabindex: 0, role: "group", "aria-label": "tokens", onclick: (e) => this.point(e, true), onmouseover: (e) => this.point(e, false), onmouseleave: () => this.pin(this.pinned), onkeydown: (e) => this.key(e) });
    toks.innerHTML = this.html(segment);
    if (origin === PROMPT) {
      return h("details", { class: "seg prompt", open: ids.length <= 60 }, h("summary", {}, h("b", {}, place && !this.program ? "history, rendered again" : "prompt"), ` · ${plural(ids.length, "token")}, not trained on; `, h("u", {}, "show or hide")), toks);
    }
    const next = this.segments[place + 1], world = this.program ? "program" : "environment";
    const goesOn = next && (next.origin !== PROMPT || !this.rollout.rows);
    const then = origin === SAMPLED && (goesOn ? ` · then the ${world}` : !next && this.rollout.answer !== null ? " · answers" : "");
    const logp = segment.streams.logprobs;
    const label = origin === SAMPLED
      ? [h("b", {}, `turn ${turn}`), ` · ${plural(ids.length, "token")} sampled${then}`, logp && ids.length ? ` · mean logp ${number(mean(Array.from(logp)))}` : "", this.rollout.split === "heldout" ? "" : ` · advantage ${signed(segment.advantage)}`]
      : [h("b", {}, world), ` · ${plural(ids.length, "token")}, not trained on`];
    const spans = (this.rollout.spans || []).filter(([start, end]) => start < segment.offset + ids.length && end > segment.offset && origin === SAMPLED);
    return h("section", { class: `seg ${origin === SAMPLED ? "sampled" : "given"}` }, h("h4", {}, label, spans.map(([, , name, value]) => h("span", { class: "pill" }, `${words(name)} ${signed(value)}`))), toks);
  }

  html(segment) {
    const { ids, texts, offset, origin } = segment;
    const query = this.query;
    const hits = query ? this.hits(texts, query) : null;
    let out = "";
    for (let k = 0; k < ids.length; k++) {
      if (k % PART === 0) out += k ? '</div><div class="part">' : '<div class="part">';
      const colour = tint(this.mode, segment, k);
      const text = texts[k];
      const special = this.run.isSpecial(ids[k]);
      const css = [special && "x", /^\n+$/.test(text) && "nl", hits && hits[k] && "hit"].filter(Boolean).join(" ");
      const shown = escaped(text).replace(/\n/g, "⏎\n") || "·";
      out += `<span data-k="${offset + k}"${css ? ` class="${css}"` : ""}${colour ? ` style="background:${colour}"` : ""}>${shown}</span>`;
    }
    return out + (ids.length ? "</div>" : "");
  }

  hits(texts, query) {
    const text = texts.join("").toLowerCase();
    const hits = new Uint8Array(texts.length);
    for (let at = text.indexOf(query); at >= 0; at = text.indexOf(query, at + 1)) {
      for (let k = 0, end = 0; k < texts.length; k++) {
        const start = end;
        end += texts[k].length;
        if (start < at + query.length && end > at) hits[k] = 1;
      }
    }
    return hits;
  }

  point(event, pin) {
    const span = event.target.closest("span[data-k]");
    if (!span) return;
    if (pin) this.pin(Number(span.dataset.k));
    else this.describe(Number(span.dataset.k));
  }

  key(event) {
    const last = this.segments.at(-1).offset + this.segments.at(-1).ids.length - 1;
    const to = { ArrowRight: this.pinned + 1, ArrowLeft: this.pinned - 1 }[event.key];
    if (to === undefined) return;
    this.pin(Math.max(0, Math.min(last, to)));
    event.preventDefault();
  }

  pin(k) {
    this.pinned = k;
    for (const span of $$(".toks span.now", this.element)) span.classList.remove("now");
    const span = k >= 0 && $(`span[data-k="${k}"]`, this.element);
    if (span) { span.classList.add("now"); span.scrollIntoView({ block: "nearest" }); }
    if (k >= 0) this.describe(k);
    else this.panel.textContent = "Point at a token, or click one and use the arrow keys.";
  }

  describe(at) {
    const segment = this.segments.find(({ offset, ids }) => at >= offset && at < offset + ids.length);
    if (!segment) return;
    const k = at - segment.offset;
    const { logprobs, learner_logprobs: learner, entropies } = segment.streams;
    const total = this.segments.at(-1).offset + this.segments.at(-1).ids.length;
    const fact = (name, value) => h("span", {}, h("span", { class: "quiet" }, name + " "), h("b", {}, value));
    this.panel.classList.remove("quiet");
    this.panel.replaceChildren(...[
      h("b", { class: "mono" }, JSON.stringify(segment.texts[k])), fact("id", segment.ids[k]), fact("token", `${at} of ${total}`),
      fact("", ["prompt", "sampled by the policy", "environment"][segment.origin]),
      logprobs && fact("p", number(Math.exp(logprobs[k]))), logprobs && fact("logp", number(logprobs[k])),
      learner && fact("learner's logp", number(learner[k])), learner && fact("ratio", Math.exp(learner[k] - logprobs[k]).toFixed(4)),
      entropies && fact("entropy", number(entropies[k])),
      segment.origin === SAMPLED && this.rollout.split !== "heldout" && fact("advantage", signed(segment.advantage)),
    ].filter(Boolean));
  }
}
