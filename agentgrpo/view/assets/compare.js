// Two runs: what was set otherwise, and the held-out tasks that both played.

function drawDifferences(runs, main, openPair) {
  const [a, b] = runs;
  const keys = [...new Set([...Object.keys(a.config), ...Object.keys(b.config)])].sort();
  const differ = keys.filter((key) => JSON.stringify(a.config[key]) !== JSON.stringify(b.config[key]));
  const shown = (value) => (value === undefined ? "–" : typeof value === "string" ? value : JSON.stringify(value));
  const settings = differ.length
    ? h("table", {}, h("thead", {}, h("tr", {}, h("th", {}, "setting"), h("th", { class: "left" }, a.name), h("th", { class: "left" }, b.name))), h("tbody", {}, differ.map((key) => h("tr", {}, h("td", { class: "mono" }, key), h("td", { class: "left" }, shown(a.config[key])), h("td", { class: "left" }, shown(b.config[key]))))))
    : h("p", { class: "quiet" }, "The two runs have the same settings.");
  const last = runs.map((run) => {
    const held = run.rollouts.filter((rollout) => rollout.split === "heldout");
    const step = held.reduce((most, rollout) => Math.max(most, rollout.step), -1);
    return new Map(held.filter((rollout) => rollout.step === step).map((rollout) => [run.task(rollout).id, rollout]));
  });
  const both = [...last[0].keys()].filter((id) => last[1].has(id)).map((id) => last.map((played) => played.get(id)));
  const better = both.filter(([x, y]) => y.reward > x.reward).length, worse = both.filter(([x, y]) => y.reward < x.reward).length;
  const body = h("tbody");
  const table = h("table", {}, h("thead", {}, h("tr", {}, h("th", { class: "left" }, "task"), h("th", {}, a.name), h("th", {}, b.name), h("th", {}, "change"), h("th", { class: "left" }, `answer of ${a.name}`), h("th", { class: "left" }, `answer of ${b.name}`))), body);
  const same = h("p", { class: "quiet" }, "They earned the same on every one of them.");
  const draw = (changed) => (same.hidden = !changed || better + worse > 0, table.hidden = !same.hidden, body.replaceChildren(...both.filter(([x, y]) => !changed || x.reward !== y.reward).map(([x, y]) => {
    const open = () => openPair(x, y);
    return h("tr", { tabindex: 0, onclick: open, onkeydown: (event) => event.key === "Enter" && open() },
      h("td", { style: "white-space: normal" }, a.question(x)), h("td", {}, number(x.reward)), h("td", {}, number(y.reward)), h("td", { class: y.reward > x.reward ? "good" : y.reward < x.reward ? "bad" : "quiet" }, signed(y.reward - x.reward)), h("td", { class: "left mono" }, x.answer ?? "–"), h("td", { class: "left mono" }, y.answer ?? "–"));
  })));
  draw(true);
  main.replaceChildren(h("div", { class: "page" },
    h("section", { class: "card" }, h("h2", {}, "Settings that differ"), h("div", { class: "scroll" }, settings)),
    h("section", { class: "card" }, h("h2", {}, "Held-out tasks that both played, at their last evaluation"),
      both.length ? [h("p", {}, `${both.length} tasks: ${b.name} earned more on ${better}, less on ${worse}. `, h("label", {}, h("input", { type: "checkbox", checked: true, onchange: (event) => draw(event.target.checked) }), " only those that differ")), same,
        h("div", { class: "scroll" }, table)]
        : h("p", { class: "quiet" }, "They have no held-out task in common."))));
}

async function drawPair(runs, pair, main, back) {
  const views = runs.map((run) => new RolloutView(run, { narrow: true }));
  main.replaceChildren(h("div", { class: "page" }, h("div", {}, h("button", { type: "button", onclick: back }, "← all tasks")), h("div", { class: "pair" }, views.map((view) => h("div", { class: "card" }, view.element)))));
  await Promise.all(views.map((view, i) => view.show(pair[i])));
}
