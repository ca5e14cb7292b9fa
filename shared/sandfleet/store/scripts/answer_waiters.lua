-- Answer every parked waiter of a thread with an error.
-- KEYS  1 prefix
-- ARGV  1 digest  2 reply payload
-- Returns how many there were.
--@use time route reply line waiters
return fail_waiters(A[1], now_ms(), A[2])
