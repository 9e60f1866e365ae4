// A group as a tree: rollouts share a line as long as their tokens are equal.

// Built once per group; markLeaf() highlights the shown rollout.
async function groupTree(run, group, choose) {
  const members = group.members;
  const all = await Promise.all(members.map((rollout) => run.outline(rollout)));
  const shared = sharedLength(all);
  const longest = Math.max(...all.map(({ ids }) => ids.length));
  const left = 10, width = 900, right = 130, rowHeight = 22;
  // the shared prompt gets at most a sixth of the width
  const head = Math.min(shared, longest), share = Math.min(head / longest, 1 / 6);
  const room = width - left - right;
  const px = (at) => left + room * (at <= head ? (at / (head || 1)) * share : share + ((at - head) / (longest - head || 1)) * (1 - share));
  const parts = [], forks = [];
  let row = 0;

  const stroke = (one, from, to, y) => one.kinds.forEach(([origin, start, end]) => {
    const [a, b] = [Math.max(from, start), Math.min(to, end)];
    if (a < b) parts.push(s("line", { x1: px(a), x2: px(b), y1: y, y2: y, stroke: ["var(--quiet)", "var(--sampled-edge)", "var(--given-edge)"][origin], "stroke-width": origin === SAMPLED ? 4 : 2.5 }));
  });

  // Draws the branch of these rollouts from token `from` on; returns its height.
  const grow = (branch, from) => {
    const end = from + sharedLength(branch, from);
    if (branch.length === 1) {
      const [one] = branch, y = 14 + rowHeight * row++;
      stroke(one, from, one.ids.length, y);
      const { rollout } = one;
      parts.push(s("g", { class: "leaf", "data-rollout": rollout.id, role: "button", tabindex: 0, "aria-label": `rollout ${rollout.index}, reward ${number(rollout.reward)}`, onclick: () => choose(rollout), onkeydown: (event) => event.key === "Enter" && choose(rollout) },
        s("circle", { cx: px(one.ids.length) + 5, cy: y, r: 4.5, fill: "currentColor", style: `color:${rewardColour(run, rollout.reward)}` }),
        s("text", { x: px(one.ids.length) + 15, y: y + 3.5 }, `${rollout.index}: ${number(rollout.reward)}${rollout.split === "heldout" ? "" : `  (${signed(rollout.advantage)})`}`)));
      return y;
    }
    const children = new Map();
    branch.forEach((one, place) => {
      const key = one.ids.length === end ? `end ${place}` : one.ids[end];
      children.set(key, [...(children.get(key) || []), one]);
    });
    const heights = [...children.values()].map((child) => grow(child, end));
    const y = mean([heights[0], heights.at(-1)]);
    stroke(branch[0], from, end, y);
    parts.unshift(s("line", { class: "grid", x1: px(end), x2: px(end), y1: heights[0], y2: heights.at(-1) }));
    if (branch.some(({ rollout }) => rollout.forked_at === end)) forks.push(s("rect", { x: px(end) - 4, y: y - 4, width: 8, height: 8, fill: "var(--d)", transform: `rotate(45 ${px(end)} ${y})` }, s("title", {}, "branch of the sampler")));
    return y;
  };
  grow(all, 0);
  const height = 14 + rowHeight * row;
  return h("section", { class: "card tree" },
    h("div", { class: "crumbs" }, h("h3", {}, `Group of ${members.length}`), h("span", { class: "quiet" }, `rollouts share a line while their tokens are equal`),
      h("span", { class: "push quiet" }, h("b", { class: "swatch prompt" }, "prompt"), " ", h("b", { class: "swatch sampled" }, "sampled"), " ", h("b", { class: "swatch given" }, "environment"), forks.length ? " ◆ branch" : "")),
    s("svg", { viewBox: `0 0 ${width} ${height}`, style: "max-height: 420px" }, parts, forks));
}

function markLeaf(tree, rollout) {
  for (const leaf of $$(".leaf", tree)) {
    const on = leaf.dataset.rollout === String(rollout.id);
    leaf.classList.toggle("on", on);
    $("circle", leaf).setAttribute("r", on ? 6 : 4.5);
  }
}

// The number of tokens that all have in common after `from`.
function sharedLength(branch, from = 0) {
  const [first, ...others] = branch;
  let end = from;
  while (end < first.ids.length && others.every(({ ids }) => end < ids.length && ids[end] === first.ids[end])) end++;
  return end - from;
}
