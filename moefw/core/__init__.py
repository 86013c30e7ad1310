"""The core that plugin authors read: kinds, hooks, contracts, facts, records. It knows no plugin by name."""
