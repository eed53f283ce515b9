"""The style sheet of a sweep's page: light and dark by the reader's own setting, and legible on a phone.

Blue for in-distribution and orange for out-of-distribution are Okabe and Ito's, each in the shade that reads on its ground.
"""

STYLE = """
:root{color-scheme:light dark;--ground:#fff;--ink:#1b1f24;--soft:#5d6670;--rule:#e4e7eb;--panel:#f7f8fa;
--id:#0072b2;--ood:#d55e00;--line:#0b6e4f;--bar:#a3324f}
@media(prefers-color-scheme:dark){:root{--ground:#14171a;--ink:#e6e9ec;--soft:#9aa4ae;--rule:#2b3138;--panel:#1b1f24;
--id:#56b4e9;--ood:#f0a232;--line:#4cc49a;--bar:#f08ca4}}
*{box-sizing:border-box}
body{margin:0;background:var(--ground);color:var(--ink);font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}
main{max-width:1140px;margin:0 auto;padding:24px 16px 64px}
h1{font-size:1.6rem;line-height:1.25;margin:0;overflow-wrap:anywhere}
h2{font-size:1.2rem;margin:44px 0 0;overflow-wrap:anywhere}
h3{font-size:.9rem;font-weight:400;color:var(--soft);margin:18px 0 4px;overflow-wrap:anywhere}
h3 b{color:var(--ink);margin-right:8px}
.lead{color:var(--soft);margin:2px 0 12px}
nav{display:flex;flex-wrap:wrap;gap:4px 18px}
a{color:var(--id)}
.wide{overflow-x:auto;-webkit-overflow-scrolling:touch}
table{border-collapse:collapse;font-size:.85rem;font-variant-numeric:tabular-nums;width:100%;min-width:760px}
th{font-weight:400;color:var(--soft);text-align:left;vertical-align:bottom}
th,td{padding:3px 12px 3px 0;white-space:nowrap;border-bottom:1px solid var(--rule)}
thead th{border-bottom:1px solid var(--soft)}
.trivial tr:first-child td{border-top:2px solid var(--soft)}
.trivial td{color:var(--soft)}
.figure{text-align:right}
.best{font-weight:700}
small{color:var(--soft);font-weight:400;font-size:.92em}
.figure small{display:inline-block;min-width:3.4em;text-align:left}
.more{color:var(--line)}.less{color:var(--bar)}
td.strip,th.strip{padding:0 12px 0 0;min-width:200px;width:26%}
svg{display:block;width:100%;height:auto;overflow:visible}
svg.strip{height:26px}svg.strip.head{height:32px}
svg text{font-size:11px;fill:var(--soft)}
.rule{stroke:var(--rule);fill:none}.axis,.tick{stroke:var(--soft);fill:none}
.thin,.mean,.chance{fill:none;stroke-linejoin:round}
.thin{stroke:var(--line);stroke-opacity:.3;stroke-width:1}
.mean{stroke:var(--line);stroke-width:2.4}
.peak{fill:var(--line);fill-opacity:.55}
.mark{fill:var(--ground);stroke:var(--line);stroke-width:2}
.chance{stroke:var(--soft);stroke-dasharray:3 3;stroke-opacity:.7}
.id{fill:var(--id);stroke:var(--id)}.ood{fill:var(--ood);stroke:var(--ood)}
.id,.ood{fill-opacity:.28;stroke-width:1.5;stroke-linejoin:round}
.seed{fill:var(--line);fill-opacity:.45}
.trivial .mean{stroke:var(--bar)}
.bar{stroke:var(--bar);stroke-width:1.5;stroke-dasharray:4 3}
details{margin:14px 0;padding:8px 14px;background:var(--panel);border-radius:8px}
summary{cursor:pointer;font-weight:600}
.row{display:grid;grid-template-columns:repeat(3,minmax(0,1fr));gap:8px 18px}
figure{margin:0;max-width:420px}
.none{margin:0;font-size:.8rem;color:var(--soft)}
.remarks,.notes{color:var(--soft);font-size:.88rem}
.remarks,.notes ul{padding-left:1.2em;margin:10px 0}
.notes h2{color:var(--ink)}
@media(max-width:760px){.row{grid-template-columns:minmax(0,1fr)}details{padding:8px 10px}main{padding:16px 10px 48px}}
@media print{details{break-inside:avoid}}
""".strip()
