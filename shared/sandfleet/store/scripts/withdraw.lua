-- A waiter gives up; the thread leaves the line with its last one.
-- KEYS  1 prefix
-- ARGV  1 digest  2 op id
-- Returns its position in the line before that (1 is the next), 0 if it did not stand there.
--@use time route reply line waiters
local ms = now_ms()
local waiting = P .. 'waiting:' .. A[1]
local rank = call('ZRANK', P .. 'parked', A[1])
call('HDEL', waiting, A[2])
local until_ms = 0
for _, w in ipairs(read_waiters(A[1], ms)) do until_ms = math.max(until_ms, w.expiry) end
if until_ms == 0 then
  call('DEL', waiting)
  leave_line(A[1])
else
  call('HSET', waiting, '@until', until_ms)
end
return rank and rank + 1 or 0
