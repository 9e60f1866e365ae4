// What is done to curves before they are drawn, and how they leave the page.

// The exponential moving average, its start not drawn towards 0: TensorBoard's smoothing. weight: of what was, 0 to below 1.
function smoothed(points, weight) {
  let sum = 0, total = 0;
  return points.map((point) => {
    [sum, total] = [weight * sum + (1 - weight) * point.y, weight * total + (1 - weight)];
    return { ...point, y: sum / total };
  });
}

// The mean of several series at each x, over those that have it, and how far apart they are there.
function combined(series, band) {
  const found = new Map();
  for (const { x, y } of series.flat()) found.set(x, [...(found.get(x) ?? []), y]);
  return [...found].sort(([a], [b]) => a - b).map(([x, ys]) => {
    const y = mean(ys), point = { x, y, runs: ys.length };
    if (band === "range") [point.low, point.high] = [Math.min(...ys), Math.max(...ys)];
    if (band === "deviation" && ys.length > 1) {
      const deviation = Math.sqrt(ys.reduce((sum, each) => sum + (each - y) ** 2, 0) / (ys.length - 1));
      [point.low, point.high] = [y - deviation, y + deviation];
    }
    return point;
  });
}

// A field of CSV (RFC 4180). Text is never a formula: what begins like one gets an apostrophe, as spreadsheets ask for.
function csvField(value) {
  if (typeof value === "number") return String(value);
  const text = /^[=+\-@\t\r]/.test(value ?? "") ? `'${value}` : String(value ?? "");
  return /[",\r\n]/.test(text) ? `"${text.replace(/"/g, '""')}"` : text;
}

const csv = (rows) => rows.map((row) => row.map(csvField).join(",") + "\r\n").join("");

// A row for each step, columns for each line of a graph: what is drawn, smoothed if that is.
function csvOfLines(lines) {
  const steps = [...new Set(lines.flatMap((line) => line.points.map((p) => p.x)))].sort((a, b) => a - b);
  const columns = lines.flatMap(({ label, points }) => {
    const at = new Map(points.map((p) => [p.x, p]));
    const parts = { y: "", low: " low", high: " high", runs: " runs" };
    return Object.keys(parts).filter((part) => points.some((p) => p[part] !== undefined)).map((part) => [label + parts[part], (x) => at.get(x)?.[part]]);
  });
  return csv([["step", ...columns.map(([name]) => name)], ...steps.map((x) => [x, ...columns.map(([, value]) => value(x))])]);
}

// Every number of every run as it was recorded, one a row.
function csvOfRuns(groups) {
  const rows = groups.flatMap((group) => group.runs.flatMap((run) => run.metricNames().flatMap((name) =>
    run.series(name).map(({ x, y }) => [group.label, run.name, run.config.seed, name, x, y]))));
  return csv([["settings", "run", "seed", "metric", "step", "value"], ...rows]);
}

function save(title, ending, blob) {
  const link = h("a", { href: URL.createObjectURL(blob), download: `${title.replace(/[^A-Za-z0-9]+/g, "-").toLowerCase()}.${ending}` });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}

// A chart on a canvas, read off its elements: the page's policy lets no image be loaded, not even one of its own making.
function painted(title, legend, figure) {
  const scale = 3, canvas = h("canvas"), pen = canvas.getContext("2d"), style = getComputedStyle;
  const card = style(legend.parentElement), font = (px, weight = 400) => `${weight} ${px}px ${card.fontFamily}`;
  pen.font = font(11);
  let x = 8, y = 34;
  const entries = [...legend.children].map((entry) => { // in rows as wide as the chart
    const width = 28 + pen.measureText(entry.textContent).width;
    if (x > 8 && x + width > BOX.width) [x, y] = [8, y + 15];
    x += width;
    return { entry, left: x - width, y };
  });
  const top = y + 6;
  [canvas.width, canvas.height] = [scale * BOX.width, scale * (top + BOX.height)];
  pen.scale(scale, scale);
  pen.fillStyle = card.backgroundColor;
  pen.fillRect(0, 0, BOX.width, top + BOX.height);
  pen.fillStyle = card.color;
  pen.font = font(13, 600);
  pen.fillText(title, 8, 17);
  pen.font = font(11);
  pen.lineWidth = 2.4;
  for (const { entry, left, y } of entries) {
    pen.fillText(entry.textContent, left + 17, y);
    pen.strokeStyle = style(entry.firstChild).getPropertyValue("--k");
    pen.setLineDash(entry.firstChild.className ? [4, 2] : []);
    pen.stroke(new Path2D(`M${left},${y - 4}h13`));
  }
  pen.translate(0, top);
  for (const element of $$("line, path, circle, text", figure)) {
    const own = style(element), of = (name) => Number(element.getAttribute(name));
    if (own.visibility === "hidden") continue;
    pen.setLineDash(own.strokeDasharray === "none" ? [] : own.strokeDasharray.split(/[ ,]+/).map(parseFloat));
    [pen.strokeStyle, pen.fillStyle, pen.lineWidth] = [own.stroke, own.fill, parseFloat(own.strokeWidth)];
    const shape = new Path2D(element.getAttribute("d") ?? "");
    if (element.tagName === "line") { shape.moveTo(of("x1"), of("y1")); shape.lineTo(of("x2"), of("y2")); }
    if (element.tagName === "circle") shape.arc(of("cx"), of("cy"), of("r"), 0, 2 * Math.PI);
    if (element.tagName === "text") {
      pen.font = font(10.5);
      pen.textAlign = { middle: "center" }[own.textAnchor] ?? own.textAnchor;
      pen.fillText(element.textContent, of("x"), of("y"));
      continue;
    }
    pen.globalAlpha = Number(own.fillOpacity);
    if (own.fill !== "none") pen.fill(shape);
    pen.globalAlpha = Number(own.strokeOpacity);
    if (own.stroke !== "none") pen.stroke(shape);
    pen.globalAlpha = 1;
  }
  return canvas;
}
