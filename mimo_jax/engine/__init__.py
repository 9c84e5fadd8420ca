"""The host side: plain Python decisions over ints (request, pages, scheduler) and the loop that drives the device."""
