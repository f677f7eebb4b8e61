"""Tables, statistics, figures, status and forecast of a study: functions of its plan and its files."""
