"""What people look at: in a terminal, and as a page. Everything about a run is read from its folder alone.

run_record   a run folder, read fast and without torch
tables       plans, evaluations and the machine
data_tables  the reports of the data commands
progress     a run while it trains
diagnosis    what went wrong, and what helps
run_checks   diagnoses of a run from its folder; they come from
             oom_checks, growth_checks, speed_checks and loss_checks, which return findings (finding)
run_figures  what these judge by: typical values with their error
long_rows    rows of a run by length
compare      runs side by side (compare_view), by their settings (run_settings), figures and losses (loss_points)
"""
