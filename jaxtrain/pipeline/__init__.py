"""Pipeline stages: schedules as tables, and the executor that runs them."""
