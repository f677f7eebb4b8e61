"""From params.yaml to the plan.

The points of the grid, the settings and keys of runs, and what has changed since the last plan.
"""
