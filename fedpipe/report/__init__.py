"""Tables, statistics, figures, status and forecast of a study, as functions of its plan and files.

`data` reads the runs, `contents` lists the files of a report, `tables` and `statistics` compute numbers, and `figures`
draws.
"""
