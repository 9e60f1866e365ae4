// Settings that differ between runs, and the held-out tasks that two runs have in common.

const compared = [0, 1]; // the slots of the two
function drawDifferences(runs, main, openPair) {
  const keys = [...new Set(runs.flatMap((run) => Object.keys(run.config)))].sort();
  const differ = keys.filter((key) => new Set(runs.map((run) => JSON.stringify(run.config[key]))).size > 1);
  const shown = (value) => (value === undefined ? "–" : typeof value === "string" ? value : JSON.stringify(value));
  const settings = differ.length
    ? h("table", {}, h("thead", {}, h("tr", {}, h("th", {}, "setting"), runs.map((run) => h("th", { class: "left" }, run.name)))), h("tbody", {}, differ.map((key) => h("tr", {}, h("td", { class: "mono" }, key), runs.map((run) => h("td", { class: "left" }, shown(run.config[key])))))))
    : h("p", { class: "quiet" }, "The runs have the same settings.");
  const heldout = h("section", { class: "card" });
  const choose = (place) => h("select", { "aria-label": place ? "Second run" : "First run", onchange: (event) => { compared[place] = Number(event.target.value); draw(); } },
    runs.map((run) => h("option", { value: run.slot, selected: run.slot === compared[place] }, run.name)));
  const draw = () => heldout.replaceChildren(h("h2", {}, "Common held-out tasks, at the last evaluation"),
    runs.length > 2 ? h("p", {}, choose(0), " and ", choose(1)) : "", drawHeldout(compared.map((slot) => runs[slot]), openPair));
  draw();
  main.replaceChildren(h("div", { class: "page" },
    h("section", { class: "card" }, h("h2", {}, "Settings that differ"), h("div", { class: "scroll" }, settings)), heldout));
}

function drawHeldout(pair, openPair) {
  const [a, b] = pair;
  const last = pair.map((run) => {
    const held = run.rollouts.filter((rollout) => rollout.split === "heldout");
    const step = held.reduce((most, rollout) => Math.max(most, rollout.step), -1);
    return new Map(held.filter((rollout) => rollout.step === step).map((rollout) => [run.task(rollout).id, rollout]));
  });
  const both = [...last[0].keys()].filter((id) => last[1].has(id)).map((id) => last.map((played) => played.get(id)));
  const better = both.filter(([x, y]) => y.reward > x.reward).length, worse = both.filter(([x, y]) => y.reward < x.reward).length;
  const body = h("tbody");
  const table = h("table", {}, h("thead", {}, h("tr", {}, h("th", { class: "left" }, "task"), h("th", {}, a.name), h("th", {}, b.name), h("th", {}, "change"), h("th", { class: "left" }, `answer of ${a.name}`), h("th", { class: "left" }, `answer of ${b.name}`))), body);
  const same = h("p", { class: "quiet" }, "Both runs have the same reward on every task.");
  const draw = (changed) => (same.hidden = !changed || better + worse > 0, table.hidden = !same.hidden, body.replaceChildren(...both.filter(([x, y]) => !changed || x.reward !== y.reward).map(([x, y]) => {
    const open = () => openPair(pair, [x, y]);
    return h("tr", { tabindex: 0, onclick: open, onkeydown: (event) => event.key === "Enter" && open() },
      h("td", { style: "white-space: normal" }, a.question(x)), h("td", {}, number(x.reward)), h("td", {}, number(y.reward)), h("td", { class: y.reward > x.reward ? "good" : y.reward < x.reward ? "bad" : "quiet" }, signed(y.reward - x.reward)), h("td", { class: "left mono" }, x.answer ?? "–"), h("td", { class: "left mono" }, y.answer ?? "–"));
  })));
  draw(true);
  if (!both.length) return h("p", { class: "quiet" }, "The runs have no held-out task in common.");
  return h("div", {}, h("p", {}, `${both.length} tasks: ${b.name} earned more on ${better}, less on ${worse}. `, h("label", {}, h("input", { type: "checkbox", checked: true, onchange: (event) => draw(event.target.checked) }), " only tasks that differ")), same,
    h("div", { class: "scroll" }, table));
}

async function drawPair(runs, pair, main, back) {
  const views = runs.map((run) => new RolloutView(run, { narrow: true }));
  main.replaceChildren(h("div", { class: "page" }, h("div", {}, h("button", { type: "button", onclick: back }, "← all tasks")), h("div", { class: "pair" }, views.map((view) => h("div", { class: "card" }, view.element)))));
  await Promise.all(views.map((view, i) => view.show(pair[i])));
}
