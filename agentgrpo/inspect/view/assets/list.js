// The list of rollouts with filter, sort and search; only visible rows exist as elements.

const ROW = 46;
const SORTS = {
  "in order": null,
  "reward, low first": (a, b) => a.reward - b.reward,
  "reward, high first": (a, b) => b.reward - a.reward,
  "advantage, low first": (a, b) => a.advantage - b.advantage,
  "advantage, high first": (a, b) => b.advantage - a.advantage,
  "longest first": (a, b) => tokens(b) - tokens(a),
  "most turns first": (a, b) => (b.stats.turns ?? 0) - (a.stats.turns ?? 0),
  "most tool errors first": (a, b) => (b.stats.tool_errors ?? 0) - (a.stats.tool_errors ?? 0),
};
const when = (rollout) => (rollout.split === "heldout" ? `held out, after ${rollout.step}` : `step ${rollout.step + 1}`);
const tokens = (rollout) => rollout.segments.reduce((sum, [origin, , length]) => sum + (origin === SAMPLED ? length : 0), 0);

class RolloutList {
  constructor(run, choose) {
    this.run = run;
    this.choose = choose;
    this.filter = { text: "", split: "", chunk: "", status: "", low: "", high: "", failed: false };
    this.sort = "in order";
    this.found = new Set();
    this.searching = 0;
    this.rows = [];
    this.current = null;
    this.viewport = h("div", { class: "list", role: "listbox", tabindex: 0, "aria-label": "Rollouts", onscroll: () => this.paint(), onkeydown: (event) => this.key(event) });
    this.sheet = h("div");
    this.viewport.append(this.sheet);
    this.count = h("div", { class: "count", "aria-live": "polite" });
    this.element = h("div", { class: "side" }, this.controls(), this.count, this.viewport);
    new ResizeObserver(() => this.paint()).observe(this.viewport);
    this.apply();
  }

  controls() {
    const values = (pick) => [...new Set(this.run.rollouts.map(pick))];
    const select = (label, name, options) => h("select", { "aria-label": label, "data-filter": name, onchange: (event) => { this.filter[name] = event.target.value; this.apply(); } },
      h("option", { value: "" }, label), options.map(([value, text]) => h("option", { value }, text)));
    const bound = (label, name) => h("input", { type: "number", step: "any", placeholder: `${label} reward`, "aria-label": `reward ${label}`, oninput: (event) => { this.filter[name] = event.target.value; this.apply(); } });
    this.search = h("input", { type: "search", placeholder: "search tasks, answers, every token  ( / )", "aria-label": "Search tasks, answers and tokens", oninput: () => this.lookUp() });
    return h("div", { class: "filters", role: "search" }, this.search,
      select("all splits", "split", values((r) => r.split).map((v) => [v, v === "heldout" ? "held out" : v])),
      select("all steps", "chunk", values((r) => r.chunk).map((chunk) => [chunk, when(this.run.rollouts.find((r) => r.chunk === chunk))])),
      select("all statuses", "status", values((r) => r.status).map((v) => [v, words(v)])),
      h("select", { "aria-label": "Order", onchange: (event) => { this.sort = event.target.value; this.apply(); } }, Object.keys(SORTS).map((name) => h("option", {}, name))),
      bound("≥", "low"), bound("≤", "high"),
      h("label", {}, h("input", { type: "checkbox", onchange: (event) => { this.filter.failed = event.target.checked; this.apply(); } }), " failed tools"));
  }

  set(name, value) {
    this.filter[name] = value;
    const control = $(`[data-filter=${name}]`, this.element);
    if (control) control.value = value;
    this.apply();
  }

  matches(rollout) {
    const { text, split, chunk, status, low, high, failed } = this.filter;
    return (!split || rollout.split === split) && (chunk === "" || rollout.chunk === Number(chunk)) && (!status || rollout.status === status)
      && (low === "" || rollout.reward >= Number(low)) && (high === "" || rollout.reward <= Number(high))
      && (!failed || rollout.stats.tool_errors > 0) && (!text || this.found.has(rollout.id));
  }

  // Search tasks and answers first, then tokens in batches, so that typing is never blocked.
  async lookUp() {
    const text = this.search.value.trim().toLowerCase();
    const turn = ++this.searching;
    this.filter.text = text;
    this.found = new Set();
    const inside = (value) => String(value ?? "").toLowerCase().includes(text);
    for (const rollout of this.run.rollouts) {
      const task = this.run.task(rollout);
      if (inside(task.id) || inside(rollout.answer) || inside(this.run.question(rollout)) || inside(JSON.stringify(task.spec))) this.found.add(rollout.id);
    }
    this.apply();
    if (!text) return;
    let done = 0;
    for (const rollout of this.run.rollouts) {
      if (!this.found.has(rollout.id) && (await this.run.text(rollout)).toLowerCase().includes(text)) this.found.add(rollout.id);
      if (++done % 100 === 0) await new Promise((resume) => setTimeout(resume));
      if (turn !== this.searching) return;
    }
    this.apply();
    document.dispatchEvent(new CustomEvent("searched"));
  }

  apply() {
    const matches = this.run.rollouts.filter((rollout) => this.matches(rollout));
    const order = SORTS[this.sort];
    this.shown = order ? [...matches].sort(order) : matches;
    this.rows = [];
    let group = null;
    for (const rollout of this.shown) {
      if (!order && rollout.inGroup !== group && rollout.inGroup.members.length > 1) this.rows.push({ group: rollout.inGroup });
      group = rollout.inGroup;
      this.rows.push({ rollout });
    }
    const groups = new Set(matches.map((rollout) => rollout.inGroup)).size;
    this.count.textContent = `${plural(matches.length, "rollout")} of ${number(this.run.rollouts.length)}, in ${plural(groups, "group")}`;
    this.sheet.style.height = `${this.rows.length * ROW}px`;
    this.paint();
  }

  paint() {
    const first = Math.max(0, Math.floor(this.viewport.scrollTop / ROW) - 6);
    const last = Math.min(this.rows.length, first + Math.ceil((this.viewport.clientHeight || 600) / ROW) + 12);
    const rows = h("div", { class: "rows", style: `top:${first * ROW}px` });
    for (let place = first; place < last; place++) rows.append(this.row(this.rows[place], place));
    this.sheet.replaceChildren(rows);
    this.viewport.setAttribute("aria-activedescendant", this.current ? `r${this.current.id}` : "");
  }

  row({ group, rollout }, place) {
    if (group) {
      const first = group.members[0];
      return h("div", { class: "row head", role: "presentation", onclick: () => this.pick(first) },
        h("div", {}, h("span", { class: "what" }, this.run.question(first))),
        h("div", { class: "small" }, h("span", {}, when(first)), h("span", { class: "strip", "aria-hidden": "true" }, group.members.map((r) => h("i", { style: `--k:${rewardColour(this.run, r.reward)}`, title: `reward ${number(r.reward)}` }))), h("span", {}, `mean ${number(mean(group.members.map((r) => r.reward)))}`)));
    }
    const alone = rollout.inGroup.members.length === 1;
    const name = alone || this.sort !== "in order" ? this.run.question(rollout) : `rollout ${rollout.index}`;
    const failed = rollout.stats.tool_errors > 0;
    return h("div", { class: "row", role: "option", id: `r${rollout.id}`, "aria-selected": String(rollout === this.current), "aria-posinset": place + 1, "aria-setsize": this.rows.length, onclick: () => this.pick(rollout) },
      h("div", {}, h("span", { class: "strip" }, h("i", { style: `--k:${rewardColour(this.run, rollout.reward)}` })), h("span", { class: "what" }, name), h("span", { class: "pill", title: "reward" }, number(rollout.reward))),
      h("div", { class: "small" }, (alone || this.sort !== "in order") && h("span", {}, when(rollout)),
        rollout.split !== "heldout" && h("span", { class: rollout.advantage > 0 ? "good" : rollout.advantage < 0 ? "bad" : "", title: "advantage: better or worse than the others of its group" }, `adv ${signed(rollout.advantage)}`),
        h("span", {}, plural(tokens(rollout), "token")), rollout.stats.turns !== undefined && h("span", {}, plural(rollout.stats.turns, "turn")),
        failed && h("span", { class: "bad", title: "failed tool calls" }, plural(rollout.stats.tool_errors, "error")),
        rollout.status !== "completed" && h("span", { class: "bad" }, words(rollout.status))));
  }

  pick(rollout) {
    this.current = rollout;
    const place = this.rows.findIndex((row) => row.rollout === rollout);
    if (place >= 0) {
      const top = place * ROW, height = this.viewport.clientHeight;
      if (top < this.viewport.scrollTop + ROW) this.viewport.scrollTop = top - ROW;
      else if (top + ROW > this.viewport.scrollTop + height) this.viewport.scrollTop = top + 2 * ROW - height;
    }
    this.paint();
    this.choose(rollout);
  }

  move(by) {
    if (!this.shown.length) return;
    const place = this.shown.indexOf(this.current);
    this.pick(this.shown[Math.max(0, Math.min(this.shown.length - 1, place + by))]);
  }

  moveGroup(by) {
    let place = this.shown.indexOf(this.current);
    const from = this.current?.inGroup;
    while (place + by >= 0 && place + by < this.shown.length && this.shown[place + by].inGroup === from) place += by;
    if (place + by >= 0 && place + by < this.shown.length) this.pick(this.shown[place + by]);
  }

  key(event) {
    const by = { ArrowDown: 1, ArrowUp: -1, PageDown: 12, PageUp: -12, Home: -1e9, End: 1e9 }[event.key];
    if (!by) return;
    this.move(by);
    event.preventDefault();
  }
}
