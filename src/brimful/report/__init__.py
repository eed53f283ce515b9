"""What people look at: in a terminal, and as a page. Everything about a run is read from its folder alone.

run_record      a run folder, read fast and without torch
tables          plans, evaluations and the machine
data_tables     the reports of the data commands
progress        a run while it trains
diagnosis       what went wrong, and what helps
diagnosis_view  the same in the terminal
log_reader      diagnoses from a training log: the cause, told from its consequences
log_stream      a log of any size, read in pieces
log_signs       how each failure looks in a log
gpu_messages    the figures of an out-of-memory message
log_settings    the settings that a log mentions
wanted_block    which tensor did not fit
remedies        fixes for each kind of failure
gpu_remedies    fixes for a full GPU
"""
