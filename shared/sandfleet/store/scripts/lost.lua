-- The owner noticed the death of its sandbox: live/creating -> lost, place freed.
-- KEYS  1 prefix
-- ARGV  1 sandbox  2 route text  3 reason
-- Returns 1, or 0 when it is not this route's or was stopping or lost already.
--@use time route story reply line waiters sandbox
local ms = now_ms()
local sb = call('HMGET', P .. 'sandbox:' .. A[1], 'state', 'route', 'owner')
if sb[2] ~= A[2] or (sb[1] ~= 'live' and sb[1] ~= 'creating') then return 0 end
make_lost(A[1], A[2], ms, A[3])
if sb[1] == 'creating' then
  fail_waiters(sb[3], ms, failure('not_started', 'the sandbox was not created: ' .. A[3],
    '"sandbox_id":"' .. A[1] .. '"' .. text('reason', A[3])))
end
return 1
