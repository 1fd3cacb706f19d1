const charts = JSON.parse(document.getElementById("charts").textContent);
const dark = matchMedia("(prefers-color-scheme: dark)");
function colours() {
  const ink = dark.matches ? "#e6eaf0" : "#1c2430", line = dark.matches ? "#2f3842" : "#d9dee5";
  const hover = dark.matches ? "#1d232a" : "#ffffff";
  return {paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", "font.color": ink, "hoverlabel.bgcolor": hover,
    "xaxis.gridcolor": line, "yaxis.gridcolor": line, "xaxis.zerolinecolor": line, "yaxis.zerolinecolor": line};
}
function paint(chart) {
  if (chart.data[0].type === "heatmap") Plotly.restyle(chart, {"textfont.color": colours()["font.color"]});
  return Plotly.relayout(chart, colours());
}
function fitted(chart) {  // on a phone a legend's names stand below one another: the chart makes room for them
  const room = 20 * chart.data.filter(trace => trace.showlegend !== false).length + 20;
  if (!chart.layout.showlegend || innerWidth > 600 || room < 90) return chart.layout;
  return {...chart.layout, height: 280 + room, margin: {...chart.layout.margin, t: room},
    legend: {...chart.layout.legend, maxheight: room}};
}
async function unpack() {  // runs the code of plotly, which is on the page as gzip in base64
  const packed = Uint8Array.from(atob(document.getElementById("plotly").textContent), letter => letter.charCodeAt(0));
  const unpacked = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const plotly = document.createElement("script");
  plotly.textContent = await new Response(unpacked).text();
  document.body.append(plotly);
}
function draw() {
  charts.forEach((chart, n) => Plotly.newPlot("chart-" + n, chart.data, fitted(chart),
    {responsive: true, displaylogo: false, displayModeBar: false}).then(paint));
  document.querySelectorAll("[name=axis]").forEach(axis => axis.addEventListener("change", () => along(axis)));
  dark.addEventListener("change", () => document.querySelectorAll(".chart").forEach(paint));
}
function along(axis) {  // draws all curves over another quantity
  document.querySelectorAll(".chart").forEach((chart, n) => {
    const curves = [...chart.data.keys()].filter(index => chart.data[index].meta);
    const x = curves.map(index => chart.data[index].meta[axis.value]);
    const layout = {"xaxis.title.text": axis.dataset.title, "xaxis.autorange": true,
      "xaxis.dtick": axis.value === "step" ? charts[n].layout.xaxis.dtick || null : null};
    if (curves.length) Plotly.update(chart, {x}, layout, curves);
  });
}
unpack().then(draw);
