-- Removal is confirmed: place free, record gone; whoever waited is requested again.
-- KEYS  1 prefix
-- ARGV  1 sandbox  2 route text
-- Returns 1, or 0 when it is not this route's.
--@use time route story reply line waiters sandbox
local ms = now_ms()
local sb = call('HMGET', P .. 'sandbox:' .. A[1], 'state', 'route', 'owner')
if sb[2] ~= A[2] or sb[1] == 'lost' then return 0 end
forget(A[1], A[2], ms)
request_again(sb[3], ms)
story(A[1], ms, 'stopped', where(A[2]))
return 1
