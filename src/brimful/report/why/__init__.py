"""`brimful why`: what a training died of, why it is slow or does not learn, and what helps.

diagnosis      the result: a cause, its figures, fixes; and how it looks in a terminal

From the text of a log, of any trainer:
log_reader     a log of any size, read in pieces, and the cause told from its consequences: `brimful.diagnose`
log_signs      how each failure looks in a log
gpu_messages   the settings that a log mentions, the figures of an out-of-memory message, and which tensor did not fit
remedies       fixes for each kind of failure
gpu_remedies   fixes for a full GPU

From the folder of a run:
run_checks     all checks, the most important finding first, together with the run's log: `diagnose_run`
oom_checks     out-of-memory errors, with fixes that the run's own memory model predicts
growth_checks  memory that grows over equal steps, and the one long row
speed_checks   where the time goes
loss_checks    losses that do not fall
"""
