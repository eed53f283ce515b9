"""A training run: the one loop around the exact step, its folder, checkpoints, evaluation, and the processes it runs in.

    session       `train`: data, plan, model and loader put together, then the loop
    options       what the user may set
    loop          the training loop and its hooks
    optimizer     optimizers and learning-rate curves by name
    average       the average of the weights that `ema` keeps
    evaluate      the loss and scores over a fixed set of rows
    patience      when a run stops because it no longer improves
    levels        the level of a noisy figure, and whether it has risen beyond noise
    choose_plan   the plan of the run before, or a new one for each kind of device
    run_plan      what a run adds to its plan: choices, sources, the predicted time, warnings
    plan_history  the plans a run has had, what changed between them, and the way back
    checkpoint    how a checkpoint becomes durable
    state         what is in a checkpoint
    run           the run's folder and the request it keeps
    events        events.jsonl: what happened, line by line
    metrics       speed, memory, padding, times and MFU of a step
    monitor       what GPU and host do meanwhile, every few seconds
    run_log       events as lines for people, and log.txt
    trackers      TensorBoard, Weights & Biases, MLflow, Trackio
    stop          signals and the time limit
    launch        the processes of `brimful train`, and how they end
    connection    whether the processes reach each other

`options`, `run`, `plan_history` and `launch` must not import torch.
"""
