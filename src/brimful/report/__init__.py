"""What people look at: in a terminal, and as a page. Everything about a run is read from its folder alone.

run_record    a run folder, read fast and without torch
run_figures   typical figures of a run with their error, for why, compare and the page
run_settings  what two runs were set to, and where their losses can be compared
compare       runs side by side: the same experiment or not, faster or not; compare_view shows it
watch/        a run in the terminal, while it trains and after
why/          what went wrong, from a log or a run folder, and what helps
page/         a run on one page
doctor/       what on this machine would stop a training or slow it down
tables        plans, evaluations and the machine
data_tables   the reports of the data commands
estimate_table  an estimate
progress      a run in the terminal that trains it
wrapped_text  lines that may end between two Chinese characters
"""
