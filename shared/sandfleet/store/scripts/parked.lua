-- A page of the line; threads that nobody waits for any more leave it.
-- KEYS  1 prefix
-- ARGV  1 lower bound in ZRANGEBYSCORE form  2 page size
-- Returns {score of the last looked at or '' at the end, {rows of digest, score, user or '', request, since ms}}
--@use time line
local ms, rows = now_ms(), {}
local page = call('ZRANGEBYSCORE', P .. 'parked', A[1], '+inf', 'WITHSCORES', 'LIMIT', 0, A[2])
for i = 1, #page, 2 do
  local one = call('HMGET', P .. 'parked:' .. page[i], 'user', 'request', 'since')
  if one[2] and awaited(page[i], ms) then
    rows[#rows + 1] = { page[i], page[i + 1], one[1], one[2], one[3] }
  else
    leave_line(page[i])
  end
end
return { #page == 2 * tonumber(A[2]) and page[#page] or '', rows }
