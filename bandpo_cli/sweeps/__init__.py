"""Sweeps: the plan, the folder, the scheduler and the job pools of many runs."""
