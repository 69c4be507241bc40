"""Pictures of a schedule's run, planned or measured: text, SVG, Chrome/Perfetto trace."""
