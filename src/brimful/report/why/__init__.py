"""`brimful why`: what a training died of, why it is slow or does not learn, and what helps.

diagnosis       the result: a cause, its figures, fixes
diagnosis_view  the same in the terminal

From the text of a log, of any trainer:
log_reader      the cause, told from its consequences: `brimful.diagnose`
log_stream      a log of any size, read in pieces
log_signs       how each failure looks in a log
gpu_messages    the figures of an out-of-memory message
log_settings    the settings that a log mentions
wanted_block    which tensor did not fit
remedies        fixes for each kind of failure
gpu_remedies    fixes for a full GPU

From the folder of a run:
run_checks      all checks, the most important finding first
run_ending      interrupted, or nothing wrong
oom_checks      out-of-memory errors, with fixes that the run's own memory model predicts
growth_checks   memory that grows over equal steps
long_rows       the one long row
speed_checks    where the time goes
loss_checks     losses that do not fall
signal_checks   what the task has warned of in its own training
finding         a diagnosis and its place among others
"""
