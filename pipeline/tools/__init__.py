"""The wing that looks at data and training: planning before a run, reporting after it, the demo."""
