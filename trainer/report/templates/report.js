/* Draws the curves and heat maps of a page from its JSON; `data-drawn` of the root tells tests how many. */
"use strict";
(() => {
  const root = document.documentElement;
  const data = JSON.parse(document.getElementById("data").textContent);
  const color = (name) => getComputedStyle(root).getPropertyValue(name).trim();
  const compact = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 4 });
  const dashes = [[], [6, 4], [2, 3], [10, 3, 2, 3]];
  const drawn = new Map();

  function format(value, percent) {
    if (value == null) return "";
    if (percent) return `${+(100 * value).toPrecision(4)} %`;
    const size = Math.abs(value);
    if (size >= 1e4) return compact.format(value);
    return size && size < 1e-3 ? value.toExponential(2).replace(/\.?0+e/, "e") : `${+value.toPrecision(4)}`;
  }

  /* Exponential moving average over about a thirtieth of the points, without the bias of its start. */
  function smoothed(values) {
    const keep = 1 - 1 / Math.max(3, values.length / 30);
    let sum = 0, weight = 0;
    return values.map((value) => {
      sum = keep * sum + (1 - keep) * value;
      weight = keep * weight + (1 - keep);
      return sum / weight;
    });
  }

  function draw(box) {
    const chart = data.charts[box.dataset.chart];
    const toggle = document.querySelector(`[data-smooth="${box.dataset.chart}"]`);
    const lines = [];
    chart.series.forEach((line, index) => {
      const stroke = color(`--c${index % 8}`), dash = dashes[Math.floor(index / 8) % 4], points = line.x.length < 40;
      const averaged = toggle && toggle.checked && line.y.length > 10;
      const shown = { label: line.label, stroke, dash, width: 1.6, points: { show: points, size: 5 }, spanGaps: true };
      shown.value = (_, value) => (value == null ? "–" : format(value, chart.percent));
      if (averaged) lines.push([line.x, line.y, { ...shown, label: `${line.label}, each`, width: 1, stroke: stroke + "55", points: { show: false } }]);
      lines.push([line.x, averaged ? smoothed(line.y) : line.y, averaged ? { ...shown, points: { show: false } } : shown]);
    });
    const axis = { stroke: color("--soft"), grid: { stroke: color("--line"), width: 1 }, ticks: { stroke: color("--line"), width: 1 } };
    const values = (_, ticks) => ticks.map((tick) => format(tick, chart.percent));
    const options = {
      width: box.clientWidth,
      height: 230,
      scales: { x: { time: false }, y: { distr: chart.log ? 3 : 1 } },
      axes: [{ ...axis, values: (_, ticks) => ticks.map((tick) => (Number.isInteger(tick) ? format(tick) : "")) }, { ...axis, values, size: 62 }],
      series: [{ label: "step" }, ...lines.map((line) => line[2])],
      legend: { live: chart.series.length <= 8 },
      cursor: { y: false },
    };
    if (drawn.has(box)) drawn.get(box).destroy();
    drawn.set(box, new uPlot(options, uPlot.join(lines.map(([x, y]) => [x, y])), box));
  }

  function heat(canvas) {
    const layer = data.experts[canvas.dataset.heat];
    const cells = Uint8Array.from(atob(layer.cells), (char) => char.charCodeAt(0));
    const parse = (name) => color(name).split(",").map(Number);
    const cold = parse("--cold"), even = parse("--even"), hot = parse("--hot");
    canvas.width = layer.columns;
    canvas.height = layer.experts;
    canvas.style.height = `${Math.min(220, Math.max(48, 8 * layer.experts))}px`;
    const context = canvas.getContext("2d"), image = context.createImageData(layer.columns, layer.experts);
    cells.forEach((cell, index) => {
      const column = Math.floor(index / layer.experts), row = index % layer.experts;
      const share = cell / 127.5, from = share < 1 ? cold : even, to = share < 1 ? even : hot, part = share < 1 ? share : share - 1;
      for (let channel = 0; channel < 3; channel++)
        image.data[4 * (row * layer.columns + column) + channel] = from[channel] + part * (to[channel] - from[channel]);
      image.data[4 * (row * layer.columns + column) + 3] = 255;
    });
    context.putImageData(image, 0, 0);
  }

  const boxes = [...document.querySelectorAll("[data-chart]")], maps = [...document.querySelectorAll("[data-heat]")];
  const drawAll = () => { boxes.forEach(draw); maps.forEach(heat); };
  drawAll();
  document.querySelectorAll("[data-smooth]").forEach((toggle) =>
    toggle.addEventListener("change", () => draw(boxes[toggle.dataset.smooth])));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  addEventListener("resize", () => drawn.forEach((plot, box) => plot.setSize({ width: box.clientWidth, height: 230 })));
  root.dataset.drawn = `${drawn.size} charts, ${maps.length} maps`;
})();
