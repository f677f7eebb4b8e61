"""From params.yaml to the plan of a study.

`planner` makes the plan, `plan` is its format, `grid` expands the grid, `run_settings` has keys, and `freshness` checks
whether a plan is current.
"""
