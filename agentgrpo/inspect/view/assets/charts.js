// Line charts as SVG: two axes, a crosshair that the mouse and the arrow keys move, a reading below.

const BOX = { width: 340, height: 170, left: 44, right: 8, top: 8, bottom: 20 };

function ticks(low, high, count) {
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((candidate) => candidate >= rough);
  const values = [];
  for (let at = Math.ceil(low / step) * step; at <= high + step * 1e-9; at += step) values.push(Math.abs(at) < step * 1e-9 ? 0 : at);
  return values;
}

function range(values, log) {
  let low = values.reduce((a, b) => Math.min(a, b)), high = values.reduce((a, b) => Math.max(a, b));
  if (log) return [10 ** Math.floor(Math.log10(low)), 10 ** Math.ceil(Math.log10(high) + 1e-9)];
  if (low >= 0 && low < high / 2) low = 0;
  if (low === high) [low, high] = low === 0 ? [0, 1] : [low - Math.abs(low) / 10, high + Math.abs(high) / 10];
  const marks = ticks(low, high, 4);
  const step = marks[1] - marks[0];
  return [low, high > marks.at(-1) + step * 1e-9 ? marks.at(-1) + step : high];
}

// lines: [{label, points: [{x, y}], colour, dash}]
function chart(title, lines, { log = false, note = "" } = {}) {
  lines = lines.map((line) => ({ ...line, points: line.points.filter((p) => !log || p.y > 0) }))
    .filter((line) => line.points.length);
  if (!lines.length) return null;
  const xs = [...new Set(lines.flatMap((line) => line.points.map((p) => p.x)))].sort((a, b) => a - b);
  const [x0, x1] = [xs[0], xs.at(-1) === xs[0] ? xs[0] + 1 : xs.at(-1)];
  const [y0, y1] = range(lines.flatMap((line) => line.points.map((p) => p.y)), log);
  const flat = (y) => (log ? Math.log10(Math.max(y, y0)) : y);
  const [wide, high] = [BOX.width - BOX.left - BOX.right, BOX.height - BOX.top - BOX.bottom];
  const px = (x) => BOX.left + ((x - x0) / (x1 - x0)) * wide;
  const py = (y) => BOX.height - BOX.bottom - ((flat(y) - flat(y0)) / (flat(y1) - flat(y0))) * high;
  const at = ({ x, y }) => `${px(x).toFixed(1)},${py(y).toFixed(1)}`;
  const marks = log
    ? Array.from({ length: Math.round(Math.log10(y1 / y0)) + 1 }, (_, i) => y0 * 10 ** i)
    : ticks(y0, y1, 4);
  const cross = s("line", { class: "cross", y1: BOX.top, y2: BOX.height - BOX.bottom, visibility: "hidden" });
  const dots = lines.map((line) => s("circle", { r: 3.2, fill: line.colour, visibility: "hidden" }));
  const reading = h("div", { class: "reading quiet", "aria-live": "off" }, note);
  const ends = ({ label, points }) => `${label} from ${number(points[0].y)} to ${number(points.at(-1).y)}`;
  const look = { role: "img", tabindex: 0, "aria-label": `${title}: ${lines.map(ends).join(", ")}` };
  const figure = s("svg", { viewBox: `0 0 ${BOX.width} ${BOX.height}`, ...look },
    marks.map((y) => [
      s("line", { class: "grid", x1: BOX.left, x2: BOX.width - BOX.right, y1: py(y), y2: py(y) }),
      s("text", { x: BOX.left - 5, y: py(y) + 3.5, "text-anchor": "end" }, short(y)),
    ]),
    ticks(x0, x1, 5).filter(Number.isInteger)
      .map((x) => s("text", { x: px(x), y: BOX.height - 5, "text-anchor": "middle" }, number(x))),
    lines.map(({ points, colour, dash }) => points.length === 1
      ? s("circle", { cx: px(points[0].x), cy: py(points[0].y), r: 3, fill: colour })
      : s("path", { class: "line", d: "M" + points.map(at).join("L"), fill: "none", stroke: colour,
        "stroke-width": 1.8, "stroke-dasharray": dash ? "5 3" : null, "vector-effect": "non-scaling-stroke" })),
    cross, dots);
  let place = -1;
  const show = (index) => {
    place = Math.max(0, Math.min(xs.length - 1, index));
    const x = xs[place];
    cross.setAttribute("x1", px(x)); cross.setAttribute("x2", px(x)); cross.setAttribute("visibility", "visible");
    const values = lines.map((line, i) => {
      const point = line.points.find((p) => p.x === x);
      dots[i].setAttribute("visibility", point ? "visible" : "hidden");
      if (!point) return null;
      dots[i].setAttribute("cx", px(x)); dots[i].setAttribute("cy", py(point.y));
      return `${line.label} ${number(point.y)}`;
    });
    reading.textContent = `after ${plural(x, "step")}: ${values.filter(Boolean).join(" · ")}`;
  };
  const leave = () => {
    for (const part of [cross, ...dots]) part.setAttribute("visibility", "hidden");
    reading.textContent = note;
  };
  figure.addEventListener("pointermove", (event) => {
    const box = figure.getBoundingClientRect();
    const x = x0 + ((((event.clientX - box.left) / box.width) * BOX.width - BOX.left) / wide) * (x1 - x0);
    const nearer = (best, candidate, i) => (Math.abs(candidate - x) < Math.abs(xs[best] - x) ? i : best);
    show(xs.reduce(nearer, 0));
  });
  figure.addEventListener("pointerleave", leave);
  figure.addEventListener("blur", leave);
  figure.addEventListener("keydown", (event) => {
    if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
    show(place + (event.key === "ArrowLeft" ? -1 : 1));
    event.preventDefault();
  });
  const legend = lines.map((line) => h("span", {},
    h("i", { class: line.dash ? "dash" : "", style: `--k: ${line.colour}` }), line.label));
  return h("section", { class: "card chart" }, h("h3", {}, title), h("span", { class: "legend" }, legend), figure, reading);
}
