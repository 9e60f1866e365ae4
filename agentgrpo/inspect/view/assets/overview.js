// The graphs, and the table of steps.

const COLOURS = ["a", "b", "c", "d", "e", "f", "g", "h"].map((name) => `var(--${name})`);
const colourOf = (place) => COLOURS[place] ?? `oklch(62% 0.14 ${(place * 137.5) % 360})`;
const GRAPHS = [
  ["Reward", [["rollout/reward", "training"], ["eval/reward", "held out"]],
    { note: "mean of all rollouts; held-out tasks are never trained on" }],
  ["Solved, share of rollouts", [["rollout/solved", "training"], ["eval/solved", "held out"]],
    { note: "rollouts that solved their task" }],
  ["Groups per step", [["rollout/groups", "all"], ["rollout/live_groups", "with a gradient"]],
    { note: "a group with equal rewards has no gradient" }],
  ["Sampled tokens per rollout", [["rollout/sampled_tokens", "training"], ["eval/sampled_tokens", "held out"]],
    { note: "tokens of the policy" }],
  ["Tool use per rollout", [["rollout/tool_calls", "calls"], ["rollout/tool_errors", "failed"]],
    { note: "tool calls and code executions" }],
  ["Entropy of the policy, nats", [["learner/entropy_mean", "entropy"]],
    { note: "0: the policy is deterministic" }],
  ["Loss", [["learner/loss", "loss"]], { note: "stays near 0; the reward shows learning" }],
  ["Gradient norm", [["learner/grad_norm", "before clipping"]],
    { note: "clipped to learner.max_grad_norm" }],
  ["Sampler and learner, largest |Δ logp|",
    [["engine/max_dlogp", "after the update"], ["learner/sampler_gap_max", "on the rollouts"]],
    { log: true, note: "small if the sampled policy is the trained one" }],
  ["Seconds per step", [["time/playing_s", "rollouts"], ["time/learning_s", "learning"]],
    { note: "rollouts with their tool calls, and the update" }],
];

// A line per run and metric. With several runs, colours are runs and dashes are metrics.
function lines(runs, metrics) {
  const several = runs.length > 1;
  return runs.flatMap((run) => metrics.map(([name, label], m) => ({
    label: several ? `${run.name} ${metrics.length > 1 ? label : ""}`.trim() : label,
    points: run.series(name),
    colour: several ? colourOf(run.slot) : COLOURS[m],
    dash: several && m > 0,
  })));
}

// [name, value, value before training]
function facts(run) {
  const last = (name) => run.series(name).at(-1)?.y;
  const evals = run.series("eval/solved");
  const steps = run.series("learner/loss").length || run.series("rollout/reward").length;
  const planned = run.config.steps;
  return [
    ["steps", number(steps) + (planned && planned > steps ? ` of ${number(planned)}` : "")],
    ["held-out solved", number(evals.at(-1)?.y), evals.length > 1 ? number(evals[0].y) : null],
    ["training reward, last step", number(last("rollout/reward"))],
    ["rollouts in this file", number(run.rollouts.length)],
    ["model", String(run.config.model ?? run.facts.model ?? "?").split("/").at(-1)],
    ["device, weights", [run.facts["learner.device"], run.facts["learner.weights"]].filter(Boolean).join(", ") || "?"],
  ];
}

function drawFacts(runs) {
  const rows = runs.map((run) => [run, facts(run)]);
  if (rows.length === 1) {
    return h("div", { class: "facts" }, rows[0][1].map(([name, value, before]) => h("div", { class: "fact" },
      h("b", {}, value), h("span", { class: "quiet" }, before ? `${name}, ${before} before` : name))));
  }
  const heads = ["run", "seed", ...rows[0][1].map(([name]) => name)];
  return h("section", { class: "card" }, h("div", { class: "scroll" }, h("table", {},
    h("thead", {}, h("tr", {}, heads.map((name) => h("th", {}, name)))),
    h("tbody", {}, rows.map(([run, known]) => h("tr", {},
      h("td", {}, h("i", { class: "key", style: `--k: ${colourOf(run.slot)}` }), run.name),
      h("td", {}, number(run.config.seed)),
      known.map(([, value, before]) => h("td", {}, before ? `${before} → ${value}` : value))))))));
}

function drawOverview(runs, main) {
  const seen = new Set(GRAPHS.flatMap(([, metrics]) => metrics.map(([name]) => name)));
  const others = [...new Set(runs.flatMap((run) => run.metricNames()))].filter((name) => !seen.has(name));
  const more = h("div", { class: "charts" });
  const details = h("details", { ontoggle: () => drawMore() },
    h("summary", {}, `${others.length} more metrics`), more);
  const drawMore = () => {
    const wanted = details.open ? others : [];
    const made = wanted.map((name) => chart(name, lines(runs, [[name, name.split("/").at(-1)]])));
    more.replaceChildren(...made.filter(Boolean));
  };
  const charts = GRAPHS.map(([title, metrics, options]) => chart(title, lines(runs, metrics), options));
  main.replaceChildren(h("div", { class: "page" }, drawFacts(runs), h("div", { class: "charts" }, charts), details));
}

const COLUMNS = [
  ["reward", "rollout/reward", "mean of the step's attempts"], ["solved", "rollout/solved", "share of them that solved their task"],
  ["groups", "rollout/groups", "tasks played"], ["live", "rollout/live_groups", "groups whose attempts earned different rewards: only these teach"],
  ["turns", "rollout/turns", "of an attempt"], ["tokens", "rollout/sampled_tokens", "that the policy wrote, an attempt"],
  ["tool calls", "rollout/tool_calls", "of an attempt"], ["tool errors", "rollout/tool_errors", "of an attempt"],
  ["broken", "rollout/infra_errors", "attempts that the machine broke: left out"], ["sampling s", "rollout/decode_s", "seconds in which the engine decoded"],
  ["waiting s", "rollout/idle_s", "seconds in which all attempts waited for their tools"], ["learning s", "learner/seconds", "forward, backward, optimizer"],
  ["loss", "learner/loss", "moves about 0"], ["grad norm", "learner/grad_norm", "before clipping"],
  ["entropy", "learner/entropy_mean", "nats a token"], ["max |Δ logp|", "learner/sampler_gap_max", "sampler against learner, nats"],
];

function statusBar(row) {
  const shares = Object.entries(row).filter(([name, share]) => name.startsWith("rollout/status_") && share > 0).map(([name, share]) => [name.slice(15), share]);
  const colour = (name) => (name === "completed" ? "var(--good)" : name === "infra_error" ? "var(--bad)" : name === "truncated_turns" ? "var(--d)" : "var(--b)");
  const said = shares.map(([name, share]) => `${words(name)} ${(100 * share).toFixed(0)} %`).join(", ");
  return h("span", { class: "bars", role: "img", title: said, "aria-label": said }, shares.map(([name, share]) => h("i", { style: `width:${100 * share}%;background:${colour(name)}` })));
}

function drawSteps(runs, main, openStep) {
  const tables = runs.map((run) => {
    const rows = run.metrics.filter((row) => "rollout/reward" in row);
    let sorted = ["step", 1];
    const body = h("tbody");
    const columns = COLUMNS.filter(([, name]) => rows.some((row) => name in row));
    const draw = () => body.replaceChildren(...[...rows].sort((a, b) => sorted[1] * ((a[sorted[0]] ?? -1e300) - (b[sorted[0]] ?? -1e300))).map((row) => {
      const open = () => openStep(run, row.step);
      return h("tr", { tabindex: 0, onclick: open, onkeydown: (event) => event.key === "Enter" && open(), title: "show its rollouts" },
        h("td", {}, row.step + 1), h("td", { class: "left" }, statusBar(row)), columns.map(([, name]) => h("td", {}, number(row[name]))));
    }));
    const sortBy = (name) => { sorted = [name, sorted[0] === name ? -sorted[1] : 1]; draw(); };
    const heading = (label, name, about = null) => h("th", {}, h("button", { type: "button", title: about, onclick: () => sortBy(name) }, label));
    draw();
    return h("section", { class: "card" }, h("h2", {}, runs.length > 1 ? run.name : "Steps"),
      h("div", { class: "scroll tall" }, h("table", {},
        h("thead", {}, h("tr", {}, heading("step", "step"), h("th", { class: "left" }, "status of rollouts"), columns.map(([label, name, about]) => heading(label, name, about)))), body)));
  });
  main.replaceChildren(h("div", { class: "page" }, tables));
}
