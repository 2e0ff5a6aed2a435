"""Look of the report: light, quiet, one column on a phone."""

CSS = """
:root { color-scheme: light; --ink: #1d2129; --soft: #667080; --line: #e3e6ea; --paper: #fff;
  --good: #1a7f4b; --bad: #b3372f; }
* { box-sizing: border-box; }
body { margin: 0; background: #f6f7f9; color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 32px 20px 64px; }
h1 { margin: 0; font-size: 26px; line-height: 1.25; font-weight: 650; overflow-wrap: anywhere; }
h2 { margin: 40px 0 4px; font-size: 18px; font-weight: 650; }
p { margin: 4px 0 14px; }
.soft, .lead { color: var(--soft); }
.lead { max-width: 80ch; text-wrap: pretty; }
.missing { margin: 20px 0 0; padding: 12px 16px; border: 1px solid #ecd9a8; border-radius: 8px;
  background: #fdf8e9; }
.missing ul { margin: 4px 0 0; padding-left: 20px; }
.facts { display: flex; flex-wrap: wrap; gap: 1px; margin: 22px 0 0; overflow: hidden;
  border: 1px solid var(--line); border-radius: 8px; background: var(--line); }
.facts div { flex: 1 1 auto; min-width: 105px; padding: 10px 14px; background: var(--paper); }
.facts dt { color: var(--soft); font-size: 13px; }
.facts dd { margin: 0; font-weight: 600; overflow-wrap: anywhere; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
.sheet { overflow-x: auto; border: 1px solid var(--line); border-radius: 8px;
  background: var(--paper); }
.sheet table { width: 100%; }
.sheet th, .sheet td { padding: 8px 14px; text-align: right; border-top: 1px solid var(--line); }
.sheet tr:first-child > :is(th, td) { border-top: 0; }
.sheet thead + tbody > tr:first-child > :is(th, td) { border-top: 1px solid var(--line); }
.sheet thead th { color: var(--soft); font-size: 13px; font-weight: 500; }
.sheet th:first-child { text-align: left; font-weight: 600; }
.sheet thead th:first-child { font-weight: 500; }
.sheet.words td { text-align: left; overflow-wrap: anywhere; }
.sheet.words { margin-top: 12px; }
.sheet.words th { width: 240px; font-weight: 500; color: var(--soft); vertical-align: top; }
.tag { margin-left: 8px; padding: 1px 7px; border-radius: 9px; background: #eceff3;
  color: var(--soft); font-size: 12px; font-weight: 500; white-space: nowrap; }
.up { color: var(--good); } .down { color: var(--bad); }
.charts { display: grid; gap: 16px; grid-template-columns: repeat(2, minmax(0, 1fr)); }
.charts.three { grid-template-columns: repeat(3, minmax(0, 1fr)); }
figure { margin: 0; padding: 12px 14px 8px; border: 1px solid var(--line); border-radius: 8px;
  background: var(--paper); }
figcaption { font-weight: 600; overflow-wrap: anywhere; }
.legend { display: flex; flex-wrap: wrap; gap: 0 16px; margin-bottom: 6px; color: var(--soft);
  font-size: 13px; }
.legend i { display: inline-block; width: 10px; height: 10px; margin-right: 6px;
  border-radius: 2px; }
.legend b { color: var(--ink); font-weight: 600; }
svg { display: block; width: 100%; height: auto; }
svg text { fill: #667080; font-size: 10.5px; }
.three svg text { font-size: 13px; }
svg .grid { stroke: #e9ecef; }
svg polyline { fill: none; stroke-width: 1.6; stroke-linejoin: round; }
.none { padding: 40px 0; color: var(--soft); text-align: center; }
.prompts { display: grid; gap: 16px; grid-template-columns: repeat(3, minmax(0, 1fr)); }
.prompt { display: grid; grid-row: span 3; grid-template-rows: subgrid; row-gap: 0;
  align-content: start; padding: 14px; border: 1px solid var(--line); border-radius: 8px;
  background: var(--paper); }
.prompt h3 { max-height: 6lh; margin: 0 0 10px; font-size: 15px; font-weight: 600;
  overflow-y: auto; overflow-wrap: anywhere; }
.pair { display: grid; grid-template-columns: 1fr 1fr; gap: 10px; }
.pair > div > span { display: block; margin-bottom: 3px; color: var(--soft); font-size: 13px; }
.pair img { display: block; width: 100%; border-radius: 4px; }
.pair img.small { image-rendering: pixelated; }
.absent { display: flex; align-items: center; justify-content: center; aspect-ratio: 1;
  padding: 8px; border: 1px dashed #c9ced6; border-radius: 4px; color: var(--soft);
  font-size: 13px; text-align: center; overflow-wrap: anywhere; }
.prompt table { width: 100%; margin-top: 8px; font-size: 13px; }
.prompt th { text-align: left; font-weight: 500; color: var(--soft); overflow-wrap: anywhere; }
.prompt td { text-align: right; white-space: nowrap; }
details { margin-top: 16px; }
summary { cursor: pointer; color: var(--soft); }
pre { padding: 14px; border: 1px solid var(--line); border-radius: 8px; background: var(--paper);
  overflow-x: auto; font-size: 13px; line-height: 1.45; }
@media (max-width: 900px) { .prompts { grid-template-columns: repeat(2, minmax(0, 1fr)); } }
@media (max-width: 700px) {
  main { padding: 20px 14px 40px; }
  .charts, .charts.three, .prompts { grid-template-columns: minmax(0, 1fr); }
  .sheet th, .sheet td { padding: 8px 10px; }
  .sheet.words th { width: 110px; }
}
"""
