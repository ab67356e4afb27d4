"""What the engine tells about itself while it works: progress bars, later metrics, traces and logs. Sinks only."""
