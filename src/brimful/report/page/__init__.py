"""`brimful report`: what a run did, on one page.

report           the page, the Markdown and the JSON of one run or of several
live             the page of a run while it trains, for a browser on this machine
report_figures   the numbers of a run
summary          a run in plain words: sentences, key figures, checklist, what to do next
parts            the parts of the page as HTML
run_charts       what is drawn of one run, or of several
planning_charts  the memory model against its probes, and throughput by micro-batch
plot             a chart that stretches with the page
page.css, page.js
                 the style and the script that the page carries
"""
