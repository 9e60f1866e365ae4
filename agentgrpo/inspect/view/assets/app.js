// Views, location hash, keyboard.

const app = { runs: [], lists: [], details: [], view: "graphs", slot: 0 };
const main = $("#main");

const views = () => ({ graphs: "Graphs", steps: "Steps", rollouts: "Rollouts", ...(app.runs.length > 1 ? { differences: "Differences" } : {}), settings: "Settings" });

function tabs() {
  $("#tabs").replaceChildren(...Object.entries(views()).map(([view, label]) => h("a", { href: `#${view}`, "aria-current": app.view === view ? "page" : null }, label)));
}

function drawSettings() {
  const table = (title, values) => h("section", { class: "card" }, h("h2", {}, title), h("div", { class: "scroll" }, h("table", {}, h("tbody", {}, Object.entries(values).map(([key, value]) => h("tr", {}, h("td", { class: "mono" }, key), h("td", { class: "left mono", style: "white-space: pre-wrap" }, typeof value === "string" ? value : JSON.stringify(value))))))));
  main.replaceChildren(h("div", { class: "page" }, app.runs.map((run) => [app.runs.length > 1 && h("h2", {}, run.name), Object.keys(run.config).length ? table("Settings", run.config) : h("p", { class: "quiet" }, "No run.json: the settings are unknown."), table("Resolved values", run.facts)])));
}

function drawRollouts() {
  const { slot } = app, run = app.runs[slot];
  if (!run.rollouts.length) {
    main.replaceChildren(h("p", { class: "page quiet" }, "This run has recorded no rollouts."));
    return;
  }
  if (!app.lists[slot]) {
    app.details[slot] = new RolloutView(run, { choose: (rollout) => app.lists[slot].pick(rollout) });
    app.lists[slot] = new RolloutList(run, (rollout) => {
      history.replaceState(null, "", `#rollouts/${slot}/${rollout.id}`);
      app.details[slot].show(rollout, app.lists[slot].filter.text);
    });
  }
  const list = app.lists[slot];
  main.replaceChildren(h("div", { class: "split" }, list.element, app.details[slot].element));
  list.paint();
  if (!list.current) list.pick(list.shown[0] || run.rollouts[0]);
}

function route() {
  const [view, slot, id] = location.hash.slice(1).split("/");
  app.view = view in views() ? view : "graphs";
  if (app.runs[slot]) app.slot = Number(slot);
  $("#which").hidden = app.runs.length < 2 || app.view !== "rollouts";
  $("#run").value = String(app.slot);
  tabs();
  if (app.view === "graphs") drawOverview(app.runs, main);
  if (app.view === "settings") drawSettings();
  if (app.view === "differences") drawDifferences(app.runs, main, (pair, rollouts) => drawPair(pair, rollouts, main, route));
  if (app.view === "steps") drawSteps(app.runs, main, (run, step) => {
    app.slot = run.slot;
    location.hash = `rollouts/${run.slot}`;
    route();  // hashchange comes later
    const list = app.lists[run.slot];
    if (!list) return;
    list.set("chunk", String(run.rollouts.find((r) => r.split === "train" && r.step === step)?.chunk ?? ""));
    if (list.shown[0]) list.pick(list.shown[0]);
  });
  if (app.view === "rollouts") {
    drawRollouts();
    const rollout = app.runs[app.slot].rollouts[Number(id)];
    if (id !== undefined && rollout && rollout !== app.lists[app.slot].current) app.lists[app.slot].pick(rollout);
  }
}

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || $("#keys").open) return;
  if (event.target.matches("input, select, textarea")) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  const list = app.view === "rollouts" && app.lists[app.slot];
  const go = { g: "graphs", s: "steps", r: "rollouts" }[event.key];
  if (go) location.hash = go;
  else if (event.key === "?") $("#keys").showModal();
  else if (list && event.key === "/") list.search.focus();
  else if (list && event.key === "j") list.move(1);
  else if (list && event.key === "k") list.move(-1);
  else if (list && event.key === "]") list.moveGroup(1);
  else if (list && event.key === "[") list.moveGroup(-1);
  else if (list && event.key >= "1" && event.key <= "5") app.details[app.slot].colour(Object.keys(MODES)[event.key - 1]);
  else return;
  event.preventDefault();
}

async function start() {
  const slots = $$("script[id^=run]:not([id*=chunk])").length;
  for (let slot = 0; slot < slots; slot++) app.runs.push(await Run.open(slot));
  $("#name").textContent = app.runs.length > 2 ? `${app.runs.length} runs` : app.runs.map((run) => run.name).join(" and ");
  $("#run").replaceChildren(...app.runs.map((run) => h("option", { value: run.slot }, run.name)));
  $("#run").addEventListener("change", (event) => { location.hash = `rollouts/${event.target.value}`; });
  const unreadable = app.runs.filter((run) => !run.tokenizer && run.rollouts.length).map((run) => run.name);
  if (unreadable.length) {
    $("#notice").hidden = false;
    $("#notice").textContent = `No tokenizer for ${unreadable.join(" and ")} (the run's folder has no checkpoint and its model was moved), so tokens are shown as ids.`;
  }
  $("#help").addEventListener("click", () => $("#keys").showModal());
  addEventListener("hashchange", route);
  addEventListener("keydown", onKey);
  route();
  document.documentElement.dataset.ready = "yes";
}

start().catch((error) => {
  $("#notice").hidden = false;
  $("#notice").textContent = `The page could not be drawn: ${error.stack || error}`;
});
