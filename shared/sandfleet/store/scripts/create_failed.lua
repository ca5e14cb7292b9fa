-- Give the place back and answer the waiters with the error.
-- KEYS  1 prefix
-- ARGV  1 sandbox  2 route text  3 reply payload  4 error code
-- Returns 1, or 0 when the reservation is not this route's any more.
--@use time route story reply waiters sandbox
local ms = now_ms()
local sb = call('HMGET', P .. 'sandbox:' .. A[1], 'state', 'route', 'owner')
if sb[1] ~= 'creating' or sb[2] ~= A[2] then return 0 end
forget(A[1], A[2])
fail_waiters(sb[3], ms, A[3])
story(A[1], ms, 'create_failed', text('code', A[4]) .. where(A[2]))
return 1
