"""From records to a report: groups, claims, figures and pages."""
