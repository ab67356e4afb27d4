"""The live view: its stream, the map of KV blocks, timelines of requests, and the table of meetings. docs/live.md."""
