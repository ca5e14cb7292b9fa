-- Put a thread that somebody waits for at its place in the line, and have the line served.
-- KEYS  1 prefix
-- ARGV  1 digest  2 user id or ''  3 request  4 queue  5 message
-- Returns how many stand in line, 0 if nothing was done.
--@use time route story reply line waiters sandbox
local ms = now_ms()
if not awaited(A[1], ms) or thread_state(A[1], ms) then return 0 end
local line, parked, one, turns = P .. 'line', P .. 'parked', P .. 'parked:' .. A[1], P .. 'turns:' .. A[2]
-- A full Redis refuses the first write, this one, so that nothing is half done.
call('HSET', line, 'queue', A[4], 'message', A[5])
call('PEXPIRE', line, KEEP)
local score = call('ZSCORE', parked, A[1])
if not score then
  local turn = next_turn(A[2])
  score = last_of(turn)
  call('ZADD', parked, score, A[1])
  call('ZADD', turns, turn, A[1])
end
call('HSETNX', one, 'user', A[2])
call('HSETNX', one, 'since', ms)
call('HSET', one, 'request', A[3])
local ttl = math.max(call('PTTL', P .. 'waiting:' .. A[1]), 0) + 2 * DAY
for _, key in ipairs({ parked, one, turns }) do keep(key, ttl) end
kick(ms)
return call('ZCARD', parked)
