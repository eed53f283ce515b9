"use strict";
// What the page does beyond showing: a theme button, values under the pointer, and news from a live run.
(() => {
  const root = document.documentElement;
  const create = (tag, name, text) => {
    const element = document.createElement(tag);
    if (name) element.className = name;
    if (text !== undefined) element.textContent = text;
    return element;
  };

  // ---- Theme: as the system says, or as chosen here ----
  const button = document.getElementById("theme");
  const system = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme || (system.matches ? "dark" : "light")) === "dark";
  const name = () => { button.textContent = isDark() ? button.dataset.light : button.dataset.dark; };
  const stored = { get() { try { return localStorage.getItem("brimful-theme"); } catch { return null; } },
                   set(theme) { try { localStorage.setItem("brimful-theme", theme); } catch { /* a page from a file may not */ } } };
  if (["light", "dark"].includes(stored.get())) root.dataset.theme = stored.get();
  button.hidden = false;
  button.addEventListener("click", () => { root.dataset.theme = isDark() ? "light" : "dark"; stored.set(root.dataset.theme); name(); });
  system.addEventListener("change", name);
  name();

  // ---- Numbers, as the rest of the page writes them ----
  const trim = (value, digits) => value.toFixed(digits).replace(/\.?0+$/, "");
  const grouped = (value, digits = 0) => value.toLocaleString("en-US", { maximumFractionDigits: digits });
  const bytes = (value) => {
    for (const [power, unit] of [[4, "TiB"], [3, "GiB"], [2, "MiB"], [1, "KiB"]]) {
      const size = value / 1024 ** power;
      if (Math.abs(size) >= 1) return `${Math.abs(size) < 100 ? trim(size, 2) : size.toFixed(0)} ${unit}`;
    }
    return `${value.toFixed(0)} B`;
  };
  const seconds = (value) => {
    if (value === 0) return "0 s";
    if (value < 0.0995) return `${Number((1000 * value).toPrecision(2))} ms`;
    if (value < 1) return `${value.toFixed(2)} s`;
    if (value < 60) return `${value.toFixed(1)} s`;
    const whole = Math.round(value), minutes = Math.floor(whole / 60);
    return minutes < 60 ? `${minutes} min ${whole % 60} s` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
  };
  const plain = (value) => {
    const size = Math.abs(value);
    return size !== 0 && (size < 1e-3 || size >= 1e6) ? value.toExponential(2).replace("e+", "e") : String(Number(value.toPrecision(4)));
  };
  const show = (value, unit) => {
    switch (unit) {
      case "bytes": return bytes(value);
      case "seconds": return seconds(value);
      case "share": return `${Number((100 * value).toPrecision(3))} %`;
      case "step": case "rows": return grouped(value);
      case "rate": return value >= 100 ? grouped(value) : String(Number(value.toPrecision(3)));
      case "celsius": return `${plain(value)} °C`;
      case "watts": return `${plain(value)} W`;
      default: return plain(value);
    }
  };

  // ---- Values under the pointer ----
  const figures = new WeakMap();
  const figuresOf = (plot) => {
    if (!figures.has(plot)) figures.set(plot, JSON.parse(plot.querySelector(".figures").textContent));
    return figures.get(plot);
  };
  const nearest = (column, x) => {
    let low = 0, high = column.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (column[middle] === null || column[middle] <= x) low = middle; else high = middle;
    }
    return Math.abs((column[high] ?? Infinity) - x) < Math.abs((column[low] ?? Infinity) - x) ? high : low;
  };
  const clear = () => document.querySelectorAll(".cross, .pin, .tip").forEach((element) => element.remove());
  const across = (data, x) => (x - data.xs[0]) / (data.xs[1] - data.xs[0]);

  const readOut = (plot, x) => {
    clear();
    const data = figuresOf(plot), area = plot.querySelector(".pane"), near = 0.02 * (data.xs[1] - data.xs[0]);
    const found = [];
    for (const curve of data.s) {
      const column = data.x[curve.x];
      if (!column.length) continue;
      const at = nearest(column, x);
      if (curve.y[at] !== null && column[at] !== null) found.push({ curve, at, x: column[at], y: curve.y[at], top: (curve.t || curve.y)[at] });
    }
    if (!found.length) return null;
    const place = found.reduce((best, one) => Math.abs(one.x - x) < Math.abs(best.x - x) ? one : best).x;
    const kept = found.filter((one) => Math.abs(one.x - place) <= near);
    const left = across(data, place);
    document.querySelectorAll(".plot").forEach((other) => {
      const its = other === plot ? data : figuresOf(other);
      if (other !== plot && (its.xu !== data.xu || its.xs[1] !== data.xs[1] || !other.offsetParent)) return;
      const line = create("div", "cross");
      line.style.left = `${100 * across(its, place)}%`;
      other.querySelector(".pane").append(line);
    });
    const tip = create("div", "tip");
    tip.append(create("b", "", `${data.xn}${data.xn ? " " : ""}${show(place, data.xu)}`));
    const names = new Set();
    for (const one of kept) {
      const height = data.log ? Math.log10(one.top) : one.top;
      const down = 1 - (height - data.ys[0]) / (data.ys[1] - data.ys[0]);
      if (down >= -0.01 && down <= 1.01) {
        const pin = create("div", `pin c${one.curve.c % 6}`);
        pin.style.left = `${100 * across(data, one.x)}%`;
        pin.style.top = `${100 * down}%`;
        area.append(pin);
      }
      if (names.has(one.curve.n)) continue;
      names.add(one.curve.n);
      const row = create("div", `c${one.curve.c % 6}`);
      const elsewhere = Math.abs(one.x - place) > near / 8 ? ` (${show(one.x, data.xu)})` : "";
      row.append(create("span", "", one.curve.n + elsewhere), create("span", "", show(one.y, data.yu)));
      tip.append(row);
    }
    for (const [at, words] of data.m) if (Math.abs(at - place) <= near / 2) tip.append(create("div", "", words));
    area.append(tip);
    const room = area.clientWidth, width = tip.offsetWidth, wanted = left * room + 14;
    tip.style.left = `${wanted + width < room ? wanted : Math.max(0, left * room - width - 14)}px`;
    return place;
  };

  let current = null;
  const pointed = (event) => {
    const area = event.target.closest && event.target.closest(".plot .pane");
    if (!area) { if (current) { current = null; clear(); apply(); } return; }
    const plot = area.closest(".plot"), box = area.getBoundingClientRect(), data = figuresOf(plot);
    current = plot;
    readOut(plot, data.xs[0] + (event.clientX - box.left) / box.width * (data.xs[1] - data.xs[0]));
  };
  document.addEventListener("pointermove", pointed);
  document.addEventListener("pointerdown", pointed);
  document.addEventListener("pointerleave", () => { current = null; clear(); apply(); });

  const status = create("div");
  status.setAttribute("role", "status");
  status.style.cssText = "position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%)";
  document.body.append(status);
  const at = new WeakMap();
  document.addEventListener("keydown", (event) => {
    const area = event.target.closest && event.target.closest(".plot .pane");
    const moves = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -Infinity, End: Infinity };
    if (!area || !(event.key in moves)) { if (event.key === "Escape") clear(); return; }
    event.preventDefault();
    const plot = area.closest(".plot"), data = figuresOf(plot), column = data.x[data.s[0].x];
    const next = Math.min(column.length - 1, Math.max(0, (at.get(plot) ?? -1) + moves[event.key]));
    at.set(plot, next);
    readOut(plot, column[next]);
    status.textContent = [...area.querySelectorAll(".tip b, .tip div")].map((line) => line.innerText.replace(/\n/g, " ")).join(", ");
  });
  document.addEventListener("focusout", clear);
  const focusable = () => document.querySelectorAll(".plot .pane").forEach((area) => { area.tabIndex = 0; });
  focusable();

  // ---- On paper everything is open ----
  addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((one) => { one.dataset.was = one.open; one.open = true; }));
  addEventListener("afterprint", () => document.querySelectorAll("details").forEach((one) => { one.open = one.dataset.was === "true"; }));

  // ---- A live run: ask for what has changed, and replace that ----
  const waiting = new Map();
  function apply() {
    for (const [id, content] of waiting) {
      const part = document.getElementById(id);
      if (!part || (current && part.contains(current))) continue; // not under the reader's pointer
      waiting.delete(id);
      const chosen = [...part.querySelectorAll("input:checked")].map((input) => input.id);
      const open = [...part.querySelectorAll("details")].map((one) => one.open);
      const focus = part.contains(document.activeElement) && document.activeElement.id;
      part.innerHTML = content; // made and escaped by the same code as the rest of this page
      chosen.forEach((id) => { const input = document.getElementById(id); if (input) input.checked = true; });
      part.querySelectorAll("details").forEach((one, place) => { if (place < open.length) one.open = open[place]; });
      if (focus) document.getElementById(focus)?.focus();
      focusable();
    }
  }
  const live = document.getElementById("live");
  if (!live) return;
  let version = Number(live.dataset.version);
  const ask = async () => {
    let pause = Number(live.dataset.every);
    try {
      const answer = await fetch(`changes?since=${version}`, { cache: "no-store" });
      if (!answer.ok) throw new Error(answer.statusText);
      const news = await answer.json();
      version = news.version;
      for (const [id, content] of Object.entries(news.parts)) waiting.set(id, content);
      document.title = news.title;
      live.hidden = true;
      root.dataset.updates = String(Number(root.dataset.updates || 0) + 1);
      if (!news.running) pause *= 5;
      apply();
    } catch {
      live.textContent = live.dataset.lost;
      live.hidden = false;
    }
    setTimeout(ask, 1000 * pause);
  };
  setTimeout(ask, 1000 * Number(live.dataset.every));
})();
