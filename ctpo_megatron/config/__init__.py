"""Config room: schema, YAML files with dotted overrides, and the checks done before anything starts. No torch."""
