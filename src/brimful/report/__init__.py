"""What people look at: in a terminal, and as a page. Everything about a run is read from its folder alone.

run_record   a run folder, read fast and without torch
tables       plans, evaluations and the machine
data_tables  the reports of the data commands
progress     a run while it trains
watch        a run in the terminal, from its folder alone
diagnosis    what went wrong, and what helps
doctor/      what on this machine would stop a training or slow it down
page         `brimful report`: what a run did, on one page
wrapped_text lines that may end between two Chinese characters
"""
