"""REST API of the controller: routes, views, errors, authorization and the run page."""
