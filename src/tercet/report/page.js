// The pointer on a curve shows step and values. Without scripts the page lacks nothing else.
"use strict";
const charts = JSON.parse(document.getElementById("series").textContent);

function nearest(xs, wanted) {
  let low = 0, high = xs.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (xs[middle] < wanted) low = middle; else high = middle;
  }
  return wanted - xs[low] <= xs[high] - wanted ? low : high;
}

for (const figure of document.querySelectorAll("[data-chart]")) {
  const { range, lines } = charts[Number(figure.dataset.chart)];
  const area = figure.querySelector(".area"), cursor = figure.querySelector(".cursor"), tip = figure.querySelector(".tip");
  // The line with most points decides which step is shown; the others answer with their nearest.
  const leader = lines.reduce((a, b) => (b.x.length > a.x.length ? b : a));

  function show(event) {
    const box = area.getBoundingClientRect();
    const share = Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
    const step = leader.x[nearest(leader.x, range[0] + share * (range[1] - range[0]))];
    const left = ((step - range[0]) / (range[1] - range[0])) * box.width;
    const rows = lines.map((line) => {
      const i = nearest(line.x, step);
      return `${line.name} ${line.y[i]}` + (line.x[i] === step ? "" : ` (step ${line.x[i]})`);
    });
    tip.replaceChildren(...[`step ${step}`, ...rows].flatMap((text, i) => (i ? [document.createElement("br"), text] : [text])));
    cursor.hidden = tip.hidden = false;
    cursor.style.left = `${left}px`;
    const place = left + 12 + tip.offsetWidth > box.width ? left - tip.offsetWidth - 12 : left + 12;
    tip.style.left = `${Math.max(0, Math.min(box.width - tip.offsetWidth, place))}px`;
  }
  function hide() { cursor.hidden = tip.hidden = true; }
  area.addEventListener("pointermove", show);
  area.addEventListener("pointerdown", show);
  area.addEventListener("pointerleave", hide);
}
