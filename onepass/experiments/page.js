// Draws the charts of a report when they come into view, in the colours of the page; and follows a report that grows.
"use strict";

(() => {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const touch = matchMedia("(pointer: coarse)").matches;
  const { onDark, live } = JSON.parse(document.getElementById("page").textContent);
  const PAUSE = 2000; // milliseconds between looks at a report that grows
  const off = new Set(); // methods that are switched off
  const inView = new Set();
  const stale = new Set(); // charts that look differently by now
  const NOTHING = { type: "scatter", x: [null], y: [null], hoverinfo: "skip" }; // keeps the axes of an empty chart
  const charts = () => document.querySelectorAll(".chart");

  // --- drawing ---

  let loading = null;
  function plotly() {
    loading ??= unpacked("plotly").then((code) => {
      const script = document.createElement("script");
      script.textContent = code;
      document.head.append(script);
      return window.Plotly;
    });
    return loading;
  }

  async function unpacked(id) {
    const packed = Uint8Array.from(atob(document.getElementById(id).textContent), (letter) => letter.charCodeAt(0));
    return new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
  }

  function described(chart) {
    const text = chart.parentElement.querySelector("script").textContent;
    if (!dark.matches) return JSON.parse(text);
    return JSON.parse(text.replace(/#[0-9A-Fa-f]{6}/g, (colour) => onDark[colour.toUpperCase()] ?? colour));
  }

  function shown(trace, chosen) {
    return trace.meta === undefined || (chosen ? trace.meta === chosen : !off.has(trace.meta));
  }

  function dressed(layout) {
    const style = getComputedStyle(document.documentElement);
    const [ink, soft, line, back] = ["--ink", "--soft", "--line", "--back"].map((name) => style.getPropertyValue(name));
    const look = { gridcolor: line, linecolor: soft, tickcolor: soft, zeroline: false, ticks: "outside", ticklen: 3 };
    const axis = (name, own) => ({ ...look, ...own, ...layout[name], title: { ...own.title, ...layout[name]?.title } });
    const axes = { xaxis: axis("xaxis", { automargin: false, title: { standoff: 16 } }),
      yaxis: axis("yaxis", { automargin: true, title: { standoff: 10 } }) };
    return { ...layout, ...axes, autosize: true, showlegend: false, hovermode: "closest", hoverdistance: 40, uirevision: "kept",
      dragmode: touch ? false : "zoom", paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      margin: { l: 50, r: 22, t: 10, b: 52, ...layout.margin },
      font: { color: ink, size: 12, family: "system-ui, sans-serif" },
      hoverlabel: { bgcolor: back, bordercolor: soft, font: { color: ink } },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: soft, activecolor: ink } };
  }

  // By name: among plotly's own choice is one that would send the chart away.
  const buttons = [["toImage", "zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d"]];

  // On a small chart, fingers scroll the page; on a large one they find buttons.
  function settings(chart) {
    const large = chart.closest(".panel").classList.contains("large");
    return { displaylogo: false, responsive: true, modeBarButtons: buttons, toImageButtonOptions: { scale: 2 },
      displayModeBar: touch ? large : "hover" };
  }

  async function draw(chart) {
    stale.delete(chart);
    try {
      const library = await plotly();
      const { data, layout } = described(chart);
      const chosen = chart.closest("figure").querySelector("select")?.value;
      const traces = data.filter((trace) => shown(trace, chosen));
      if (!traces.length) traces.push(NOTHING);
      await library.react(chart, traces, dressed(layout), settings(chart));
      chart.dataset.drawn = traces.length;
    } catch (error) {
      failed(chart.closest("figure"), error);
    }
  }

  // A browser too old for this page still has the picture.
  function failed(figure, error) {
    console.warn("onepass: no chart, its picture instead", error);
    if (!figure || figure.classList.contains("failed")) return;
    figure.classList.add("failed");
    const picture = figure.querySelector("noscript");
    if (picture) picture.insertAdjacentHTML("afterend", picture.textContent);
  }

  function refresh(some = charts()) {
    for (const chart of some) {
      stale.add(chart);
      if (inView.has(chart)) draw(chart);
    }
  }

  const watch = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) {
      inView[isIntersecting ? "add" : "delete"](target);
      if (isIntersecting && stale.has(target)) draw(target);
    }
  }, { rootMargin: "300px" });

  function begin(chart) {
    stale.add(chart);
    watch.observe(chart);
  }

  // --- what a reader can change ---

  const chips = () => [...document.querySelectorAll("#chips [data-method]")];

  function only(wanted) {
    for (const { dataset: { method } } of chips()) off[wanted(method) ? "delete" : "add"](method);
    press();
    refresh();
  }

  function press() {
    for (const chip of chips()) chip.setAttribute("aria-pressed", String(!off.has(chip.dataset.method)));
  }

  function grow(button) {
    const panel = button.closest(".panel");
    const large = panel.classList.toggle("large");
    button.setAttribute("aria-expanded", String(large));
    draw(panel.querySelector(".chart"));
  }

  document.addEventListener("click", ({ target }) => {
    const button = target.closest("button");
    if (!button) return;
    const { method, every } = button.dataset;
    if (method) only((name) => (name === method ? off.has(name) : !off.has(name)));
    else if (every) only(() => every === "on");
    else if (button.matches(".grow")) grow(button);
  });
  document.addEventListener("dblclick", ({ target }) => {
    const chip = target.closest("[data-method]");
    if (chip) only((name) => name === chip.dataset.method);
  });
  document.addEventListener("change", ({ target }) => {
    if (target.matches(".choose select")) refresh(target.closest("figure").querySelectorAll(".chart"));
  });
  dark.addEventListener("change", () => refresh());

  // --- a report that grows ---

  // Takes over what is new, section by section. A chart that is there is redrawn in its place, and keeps its zoom.
  function takeOver(main) {
    const next = new DOMParser().parseFromString(main, "text/html");
    const old = new Map([...document.querySelectorAll("[data-part]")].map((part) => [part.dataset.part, part]));
    let before = null;
    for (const part of next.querySelectorAll("[data-part]")) {
      const had = old.get(part.dataset.part);
      old.delete(part.dataset.part);
      if (had?.dataset.print === part.dataset.print) {
        before = had;
        continue;
      }
      const now = document.adoptNode(part);
      if (had) keepCharts(had, now);
      if (had) had.replaceWith(now);
      else if (before) before.after(now);
      else document.querySelector("main").prepend(now);
      now.querySelectorAll(".chart").forEach(begin);
      refresh(now.querySelectorAll(".chart"));
      before = now;
    }
    for (const gone of old.values()) gone.remove();
    press();
  }

  function keepCharts(had, now) {
    for (const chart of had.querySelectorAll(".chart")) {
      const place = now.querySelector(`#${CSS.escape(chart.id)}`);
      if (!place) continue;
      const large = chart.closest(".panel").classList.contains("large");
      place.closest(".panel").classList.toggle("large", large);
      place.replaceWith(chart);
    }
    const [from, to] = [had, now].map((part) => part.querySelector("select"));
    if (from && to && [...to.options].some(({ value }) => value === from.value)) to.value = from.value;
    now.querySelectorAll("details").forEach((one, k) => (one.open = had.querySelectorAll("details")[k]?.open ?? false));
  }

  async function follow(seen, misses = 0) {
    const status = document.getElementById("live");
    try {
      const answer = await fetch(`state?seen=${seen}`);
      const { version, main } = await answer.json();
      if (main !== null) takeOver(main);
      [seen, misses] = [version, 0];
      status.textContent = "Live: this page follows its folder.";
    } catch (error) {
      console.warn("onepass: no news", error);
      misses += 1;
      status.textContent = "Not live: `onepass report --live` does not answer. What is here stays.";
    }
    setTimeout(follow, misses > 2 ? 5 * PAUSE : PAUSE, seen, misses);
  }

  document.documentElement.classList.add("scripted");
  charts().forEach(begin);
  if (live !== null) follow(live);
})();
