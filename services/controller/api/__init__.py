"""The REST face of the controller: routes, views, errors, who may do what, the run page."""
