"""What people look at in a terminal.

tables       plans, evaluations and the machine
data_tables  the reports of the data commands
progress     a run while it trains
"""
