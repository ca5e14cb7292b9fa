-- Give the place back and answer the waiters with the error.
-- KEYS  1 prefix
-- ARGV  1 sandbox  2 route text  3 reply payload  4 error code  5 the error, at most 4000 characters
-- Returns 1, or 0 when the reservation is not this route's any more.
--@use time route story reply line waiters sandbox
local ms = now_ms()
local sb = call('HMGET', P .. 'sandbox:' .. A[1], 'state', 'route', 'owner')
if sb[1] ~= 'creating' or sb[2] ~= A[2] then return 0 end
forget(A[1], A[2], ms)
-- A thread whose sandbox cannot be started is tried again at once, then after ever longer pauses.
if A[4] == 'start_failed' then
  local failing = P .. 'failing:' .. sb[3]
  local fails = call('HINCRBY', failing, 'fails', 1)
  local pause = fails > 1 and math.min(60000, 500 * 2 ^ math.min(fails - 1, 20)) or 0
  call('HSET', failing, 'retry_at', ms + pause, 'error', A[5])
  call('PEXPIRE', failing, 600000)
end
fail_waiters(sb[3], ms, A[3])
story(A[1], ms, 'create_failed', text('code', A[4]) .. where(A[2]))
return 1
