"""What studies, evaluations and pages of experience are shown with: charts, tables, statistics, page templates."""
