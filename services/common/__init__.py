"""Code that all services share; it never imports one of them."""
