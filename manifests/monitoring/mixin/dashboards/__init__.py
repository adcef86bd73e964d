"""The three dashboards, each a builder from the SDK of Grafana."""
