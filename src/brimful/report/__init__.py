"""What people look at: in a terminal, and as a page. Everything about a run is read from its folder alone.

run_record    a run folder, read fast and without torch
watch/        a run in the terminal, while it trains and after
why/          what went wrong, from a log or a run folder, and what helps
compare       runs side by side: the same experiment or not, faster or not; compare_view shows it
run_figures   typical figures of a run with their error, for why and compare
loss_points   where the losses of two runs can be compared
run_settings  what a run was asked to do, and what makes two runs one experiment
page/         a run on one page
doctor/       what on this machine would stop a training or slow it down
tables        plans, evaluations and the machine
data_tables   the reports of the data commands
progress      a run in the terminal that trains it
wrapped_text  lines that may end between two Chinese characters
"""
