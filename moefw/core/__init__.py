"""The core that plugin authors read: hook points, contracts, facts and records. It knows no plugin by name."""
