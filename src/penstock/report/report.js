// Tells what is known of the iteration under the pointer, or, with the arrow keys, of the next one.
"use strict";
(() => {
  const story = JSON.parse(document.getElementById("data").textContent);
  const { number, ms, simulated, kept, baseline, decision, delays } = story.iterations;
  const tip = document.getElementById("r-tip");
  const figures = [...document.querySelectorAll("[data-hover]")].map((figure) => {
    const svg = figure.querySelector("svg");
    const place = (name) => Number(figure.dataset[name]);
    const guide = svg.appendChild(document.createElementNS("http://www.w3.org/2000/svg", "line"));
    guide.setAttribute("class", "r-guide");
    guide.setAttribute("y1", place("top"));
    guide.setAttribute("y2", place("bottom"));
    guide.style.display = "none";
    return { figure, svg, guide, left: place("left"), right: place("right"), low: place("low"), high: place("high") };
  });
  let at = -1;

  const short = (v) => {
    const size = Math.abs(v), digits = size >= 1000 ? 0 : size >= 100 ? 1 : size >= 1 ? 2 : 3;
    return String(Number(v.toFixed(digits)));
  };

  // The place of the iteration whose number is nearest to `wanted`.
  function nearest(wanted) {
    let low = 0, high = number.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (number[middle] <= wanted) low = middle; else high = middle;
    }
    return Math.abs(number[low] - wanted) <= Math.abs(number[high] - wanted) ? low : high;
  }

  function rows(i) {
    const found = [["measured", ms[i]], ["simulated", simulated[i]], ["first configuration", kept[i]],
      ["measured before the changes", baseline[i]]];
    const out = found.filter(([, v]) => v !== null).map(([name, v]) => [name, short(v) + " ms"]);
    out.push(["runs", decision[i] ? "decision " + decision[i] : "the start"]);
    const late = story.links.map((link, k) => [link, delays[k][i]]).filter(([, v]) => v !== null);
    late.sort((a, b) => b[1] - a[1]);
    const many = late.filter(([, v]) => v >= story.smallest_delay).length;
    for (const [[a, b], v] of late.slice(0, Math.max(1, Math.min(6, many)))) out.push([a + " → " + b, short(v) + " ms"]);
    return out;
  }

  function tell(i, shown, x, y) {
    at = i;
    for (const each of figures) {
      const px = each.left + ((number[i] - each.low) / (each.high - each.low)) * (each.right - each.left);
      each.guide.setAttribute("x1", px);
      each.guide.setAttribute("x2", px);
      each.guide.style.display = "";
    }
    tip.replaceChildren();
    tip.appendChild(document.createElement("b")).textContent = "iteration " + number[i];
    const list = tip.appendChild(document.createElement("dl"));
    for (const [name, value] of rows(i)) {
      list.appendChild(document.createElement("dt")).textContent = name;
      list.appendChild(document.createElement("dd")).textContent = value;
    }
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    tip.style.left = Math.max(4, x + 16 + box.width > innerWidth - 8 ? x - box.width - 16 : x + 16) + "px";
    tip.style.top = Math.max(4, y + 18 + box.height > innerHeight - 8 ? y - box.height - 18 : y + 18) + "px";
  }

  function hush() {
    at = -1;
    tip.hidden = true;
    for (const each of figures) each.guide.style.display = "none";
  }

  for (const each of figures) {
    const { figure, svg, left, right, low, high } = each;
    const scale = () => svg.getBoundingClientRect().width / svg.viewBox.baseVal.width;
    figure.addEventListener("pointermove", (e) => {
      const x = (e.clientX - svg.getBoundingClientRect().left) / scale();
      if (x < left - 4 || x > right + 4) hush();
      else tell(nearest(low + ((x - left) / (right - left)) * (high - low)), figure, e.clientX, e.clientY);
    });
    figure.addEventListener("pointerleave", hush);
    figure.addEventListener("blur", hush);
    figure.addEventListener("keydown", (e) => {
      const steps = { ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20, Home: -number.length, End: number.length };
      if (e.key === "Escape") hush();
      if (!(e.key in steps)) return;
      e.preventDefault();
      const i = Math.min(number.length - 1, Math.max(0, (at < 0 ? 0 : at) + steps[e.key]));
      const box = svg.getBoundingClientRect();
      tell(i, figure, box.left + (left + ((number[i] - low) / (high - low)) * (right - left)) * scale(), box.top + box.height / 3);
    });
  }
})();
